// Paged caches: what pages must not change, and bad input.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "invalid_problem.h"
#include "testing/pages.h"
#include "testing/run.h"
#include "testing/targets.h"

namespace fattn::testing {
namespace {

using namespace test;

// ---- Bits -------------------------------------------------------------------------------------------------------------

Case in_pages(DType dtype, int64_t page_size, int64_t seqlen_q) {
  Case c;
  c.dtype = dtype;
  c.batch = 3;
  c.seqlen_q = seqlen_q;
  c.seqlen_k = (400 + page_size - 1) / page_size * page_size;
  c.nheads = 6;
  c.nheads_k = 2;
  c.headdim = c.headdim_v = 64;
  c.causal = c.key_lengths = true;
  c.backward = false;
  c.page_size = page_size;
  return c;
}

// Of each instruction set: the same bits as from keys side by side, in every layout of pages.
void expect_bits_of_keys_side_by_side(Case c) {
  for (const Layout layout : {Layout::kBshd, Layout::kBhsd, Layout::kPadded}) {
    c.layout = layout;
    const CaseInputs paged = make_inputs(c);
    const Unpaged keys(paged.k, paged.v, paged.scores);
    for (const Target& target : all_targets()) {
      if (!is_to_compute(target, c) || !why_unavailable(target, c.dtype).empty()) continue;
      CaseInputs side_by_side;
      side_by_side.q = paged.q;
      side_by_side.k = keys.k();
      side_by_side.v = keys.v();
      side_by_side.scores = keys.scores();
      Options options = options_of(c, target);
      const Outputs got = run_passes(c, paged, options);
      if (c.varlen) options.max_seqlen_k = c.seqlen_k;
      EXPECT_TRUE(same_bits(got, run_passes(c, side_by_side, options))) << name_of(c) << ", " << name_of(target);
    }
  }
}

TEST(PagesSmall, ChangeNoBit) {
  for (const auto& [dtype, page_size] : {std::pair{DType::kF32, 3}, {DType::kF16, 16}, {DType::kBF16, 128}})
    for (const int64_t seqlen_q : {2, 70}) expect_bits_of_keys_side_by_side(in_pages(dtype, page_size, seqlen_q));
}
TEST(Pages, OfAnySizeChangeNoBit) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16})
    for (const int64_t page_size : {1, 3, 16, 24, 128})
      for (const int64_t seqlen_q : {2, 70}) expect_bits_of_keys_side_by_side(in_pages(dtype, page_size, seqlen_q));
}
TEST(PagesSmall, ChangeNoBitOfWhatElseScoresDependOn) {
  for (const DType dtype : {DType::kF32, DType::kBF16})
    for (const int64_t seqlen_q : {3, 70}) {
      Case c = in_pages(dtype, 16, seqlen_q);
      c.window_left = 50;
      expect_bits_of_keys_side_by_side(c);
      c.headdim = 40;
      c.headdim_v = 72;
      c.mask = Pairs::kHeads;
      c.inputs = Inputs::kSpoiltValues;
      expect_bits_of_keys_side_by_side(c);
      c.inputs = Inputs::kNormal;
      c.documents = Documents::kSorted;
      c.sinks = true;
      c.p_dropout = 0.3;
      expect_bits_of_keys_side_by_side(c);
      c.varlen = true;
      expect_bits_of_keys_side_by_side(c);
    }
}

// ---- Bad input --------------------------------------------------------------------------------------------------------

// Four pages of four keys in reverse order, two to each batch entry.
struct GoodPages : Good {
  int32_t table[kBatch * 2] = {3, 2, 1, 0}, lengths[kBatch] = {5, 8};
  static constexpr int64_t kPages = 4, kPage = 4;

  explicit GoodPages(Backend backend = Backend::kCpu, bool backward = false) : Good(backward, backend) {
    for (fattn_tensor* t : {&problem.k, &problem.v, &problem.dk, &problem.dv}) {
      if (t->ndim == 0) continue;
      t->shape[0] = kPages;
      t->shape[1] = kPage;
      t->strides[0] /= 2;
    }
    problem.block_table = Tensor(table, DType::kI32, {kBatch, 2}).raw();
    problem.seqused_k = Tensor(lengths, DType::kI32, {kBatch}).raw();
  }
};

TEST(PagesSmall, BadTables) {
  for (const Backend backend : {Backend::kReference, Backend::kCpu}) {
    GoodPages good(backend);
    ASSERT_EQ(fattn_execute(&good.problem), FATTN_OK) << fattn_last_error();
    const auto spoilt = [&](auto spoil) {
      fattn_problem p = good.problem;
      spoil(p);
      return p;
    };
    expect_invalid(spoilt([](fattn_problem& p) { p.block_table.dtype = FATTN_I64; }), {"block_table has the dtype", "int32 (5), numbers of pages"});
    expect_invalid(spoilt([](fattn_problem& p) { p.block_table.ndim = 1; }), {"block_table has 1 dimensions", "2 (batch, columns)"});
    expect_invalid(spoilt([](fattn_problem& p) { p.block_table.shape[0] = 1; }), {"block_table has the shape (1, 2)", "(2, 2)"});
    expect_invalid(spoilt([](fattn_problem& p) { p.block_table.strides[1] = 2; }), {"block_table has the stride 2", "must be 1"});
    expect_invalid(spoilt([](fattn_problem& p) { p.block_table.data = nullptr; }), {"block_table is a null pointer"});
    expect_invalid(spoilt([](fattn_problem& p) { p.block_table.shape[1] = int64_t{1} << 40; }), {"block_table has the shape", "fewer columns"});
    expect_invalid(spoilt([](fattn_problem& p) { p.k.shape[1] = p.v.shape[1] = 0; }), {"k has the shape", "pages of 0 keys", "at least 1"});
    expect_invalid(spoilt([](fattn_problem& p) { p.k.ndim = 3; }), {"k has 3 dimensions", "(pages, page_size, heads, headdim)"});
    expect_invalid(spoilt([](fattn_problem& p) { p.v.shape[0] = 3; }), {"v has the shape (3, 4, 2, 8)", "from k's pages, page size and heads"});
    expect_invalid(spoilt([](fattn_problem& p) { p.cu_seqlens_k = p.seqused_k; }), {"block_table and cu_seqlens_k are both given"});
    // Without lengths all pages are read.
    EXPECT_EQ(fattn_execute((good.problem.seqused_k = {}, &good.problem)), FATTN_OK) << fattn_last_error();
  }
}

TEST(PagesSmall, BadNumbersOfPages) {
  for (const Backend backend : {Backend::kReference, Backend::kCpu}) {
    GoodPages good(backend);
    good.lengths[1] = 9;
    expect_invalid(good.problem, {"seqused_k[1] is 9", "0 to 8, the keys of 2 pages of 4, which block_table has columns for"});
    good.lengths[1] = -1;
    expect_invalid(good.problem, {"seqused_k[1] is -1"});
    good.lengths[1] = 4;
    good.table[3] = -1;  // no key of it is used
    EXPECT_EQ(fattn_execute(&good.problem), FATTN_OK) << fattn_last_error();
    for (const int32_t page : {-1, 4, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()}) {
      good.table[1] = page;  // one key of it is
      expect_invalid(good.problem, {"block_table[0, 1] is " + std::to_string(page) + ", of 5 keys", "0 to 3, the last page of k"});
    }
    good.table[1] = 3;  // pages may be shared, even by one entry
    EXPECT_EQ(fattn_execute(&good.problem), FATTN_OK) << fattn_last_error();
  }
}

TEST(PagesSmall, WhatDoesNotComputeThem) {
  for (const Backend backend : {Backend::kReference, Backend::kCpu}) {
    GoodPages good(backend, true);
    expect_error(good.problem, FATTN_ERROR_UNSUPPORTED, {"the backward pass does not compute a paged cache (block_table)", "without block_table"});
  }
  for (const int32_t algorithm : {FATTN_ALGORITHM_STANDARD, FATTN_ALGORITHM_V1}) {
    GoodPages good;
    good.problem.algorithm = algorithm;
    good.problem.seqused_k = {};
    expect_error(good.problem, FATTN_ERROR_UNSUPPORTED, {"does not compute a paged cache (block_table)", "algorithm v2 of backend cpu"});
  }
}

// ---- Costs ------------------------------------------------------------------------------------------------------------

// Pages that entries share are read once.
TEST(PagesSmall, BytesAreThoseOfTheCache) {
  GoodPages good;
  const double with_all = Plan(good.problem).info().bytes;
  good.problem.k.shape[0] = good.problem.v.shape[0] = 2;
  EXPECT_EQ(Plan(good.problem).info().bytes, with_all - 2 * 4 * kNheadsK * (kHeaddim + kHeaddimV) * 4.0);
  good.problem.k.shape[0] = good.problem.v.shape[0] = 100;
  EXPECT_EQ(Plan(good.problem).info().bytes, with_all);
}

}  // namespace
}  // namespace fattn::testing
