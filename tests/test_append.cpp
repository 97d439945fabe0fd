// New keys and values into a cache: every instruction set, the reference and every dtype against plain indexing in float64.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "append_problems.h"

namespace fattn {
namespace {

using namespace test;

void expect_as_plain_indexing(uint64_t begin, uint64_t end) {
  for (uint64_t seed = begin; seed < end; ++seed) {
    const Append a = random_append(seed), expected = a.wide(), wide = a.wide();
    append_by_indexing(expected);
    wide.run();
    const std::string what = ", seed " + std::to_string(seed);
    expect_appended(wide, expected, "the reference in float64" + what);
    std::vector<RowOptions> ways(1);
    ways[0].backend = Backend::kReference;
    for (const Isa isa : isas_here()) {
      ways.emplace_back();
      ways.back().cpu_isa = isa;
    }
    for (const RowOptions& way : ways) {
      Append own = a.copy();
      if (a.q.view() && a.q_out.same_memory(a.q)) own.q = own.q_out;
      own.run(way);
      expect_appended(own, expected, std::string(name_of(way.cpu_isa)) + what);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(AppendSmall, EveryInstructionSetIsAsPlainIndexing) { expect_as_plain_indexing(0, 15); }
TEST(Append, ManyMoreAreAsPlainIndexing) { expect_as_plain_indexing(15, 60); }

// What neither turns nor changes its dtype keeps its bits, NaN's and subnormal ones too; and nothing else of the caches is written.
TEST(AppendSmall, BitsStay) {
  for (const DType dtype : kDtypes)
    for (const bool turned : {false, true}) {
      Append a;
      a.k = RowTensor(dtype, {2, 3, 2, 8}), a.v = RowTensor(dtype, {2, 3, 2, 8}, {0, 2, 1, 3});
      a.k_cache = RowTensor(dtype, {2, 9, 2, 8}), a.v_cache = RowTensor(dtype, {2, 9, 2, 8});
      a.cache_seqlens = list(DType::kI32, {4, 0});
      if (turned) {
        a.cos = RowTensor(DType::kF32, {20, 2}), a.sin = RowTensor(DType::kF32, {20, 2});
        a.cos.fill_normal(1, 1), a.sin.fill_normal(1, 2);
      }
      const auto bytes = static_cast<size_t>(a.k.size()) * size_of(dtype);
      for (const RowTensor& t : {a.k, a.v})
        for (size_t i = 0; i < bytes; ++i) static_cast<unsigned char*>(t.data())[i] = static_cast<unsigned char>(i * 149 + 127);
      const auto bits = [&](const RowTensor& t, int64_t i) {
        uint32_t of = 0;
        std::memcpy(&of, static_cast<const char*>(t.data()) + static_cast<size_t>(i) * size_of(dtype), size_of(dtype));
        return of;
      };
      a.run();
      for (int64_t n = 0; n < 2; ++n)
        for (int64_t row = 0; row < 9; ++row)
          for (int64_t h = 0; h < 2; ++h)
            for (int64_t d = 0; d < 8; ++d) {
              const int64_t nth = row - (n == 0 ? 4 : 0), at = ((n * 9 + row) * 2 + h) * 8 + d;
              const bool is_new = 0 <= nth && nth < 3;
              const uint32_t untouched = dtype == DType::kF32 ? 0xffffffffu : 0xffffu;
              if (!turned || d >= 4 || !is_new) {
                EXPECT_EQ(bits(a.k_cache, at), is_new ? bits(a.k, ((n * 3 + nth) * 2 + h) * 8 + d) : untouched);
              }
              EXPECT_EQ(bits(a.v_cache, at), is_new ? bits(a.v, ((n * 2 + h) * 3 + nth) * 8 + d) : untouched);
            }
    }
}

TEST(AppendSmall, ThreadsChangeNoBit) {
  Append a;
  a.k = RowTensor(DType::kBF16, {3, 211, 8, 64}), a.v = RowTensor(DType::kF32, {3, 211, 8, 64}), a.q = RowTensor(DType::kBF16, {3, 211, 8, 64});
  a.k_cache = RowTensor(DType::kBF16, {3, 300, 8, 64}), a.v_cache = RowTensor(DType::kF16, {3, 300, 8, 64}), a.q_out = a.q.copy();
  a.cos = RowTensor(DType::kF32, {300, 32}), a.sin = RowTensor(DType::kF32, {300, 32});
  for (const RowTensor& t : {a.k, a.v, a.q, a.cos, a.sin}) t.fill_normal(1, 1);
  a.options.cache_seqlen = 50;
  RowOptions way;
  way.num_threads = 1;
  const Append one = a.copy(), many = a.copy();
  one.run(way);
  way.num_threads = 5;
  many.run(way);
  EXPECT_TRUE(one.k_cache.same_bits(many.k_cache));
  EXPECT_TRUE(one.v_cache.same_bits(many.v_cache));
  EXPECT_TRUE(one.q_out.same_bits(many.q_out));
}

// A step of decoding: turned at once and turned before the append are the same bits.
TEST(AppendSmall, TurnsAsRotaryDoes) {
  Append a;
  a.k = RowTensor(DType::kBF16, {2, 2, 3, 16}), a.v = RowTensor(DType::kBF16, {2, 2, 3, 16}), a.q = RowTensor(DType::kBF16, {2, 2, 6, 16});
  a.k_cache = RowTensor(DType::kBF16, {2, 9, 3, 16}), a.v_cache = RowTensor(DType::kBF16, {2, 9, 3, 16}),
  a.q_out = RowTensor(DType::kBF16, {2, 2, 6, 16});
  a.cos = RowTensor(DType::kF32, {9, 5}), a.sin = RowTensor(DType::kF32, {9, 5});
  for (const RowTensor& t : {a.k, a.v, a.q, a.cos, a.sin}) t.fill_normal(3, 1);
  a.cache_seqlens = list(DType::kI64, {7, 2});
  a.run();
  RotaryOptions options;
  options.offsets = a.cache_seqlens.view();
  const RowTensor k = a.k.copy(), q = a.q.copy();
  rotary(k.view(), a.cos.view(), a.sin.view(), k.view(), options);
  rotary(q.view(), a.cos.view(), a.sin.view(), q.view(), options);
  EXPECT_TRUE(q.same_bits(a.q_out));
  for (int64_t n = 0; n < 2; ++n)
    for (int64_t i = 0; i < 2 * 48; ++i) EXPECT_EQ(a.k_cache.at((n * 9 + (n == 0 ? 7 : 2)) * 48 + i), k.at(n * 96 + i));
}

// More than the checks have room for without memory of their own.
TEST(AppendSmall, ManyPages) {
  Append a;
  const int64_t keys = 700;
  a.k = RowTensor(DType::kF32, {1, keys, 1, 4}), a.v = RowTensor(DType::kF32, {1, keys, 1, 4});
  a.k_cache = RowTensor(DType::kF32, {keys, 1, 1, 4}), a.v_cache = RowTensor(DType::kF32, {keys, 1, 1, 4});
  a.k.fill_normal(1, 1), a.v.fill_normal(1, 2);
  a.block_table = RowTensor(DType::kI32, {1, keys});
  a.block_table.fill([&](int64_t i) { return static_cast<double>(i * 3 % keys); });
  a.run();
  for (int64_t i = 0; i < keys; ++i) ASSERT_EQ(a.k_cache.at(i * 3 % keys * 4 + 1), a.k.at(i * 4 + 1));
  a.block_table.set(698, a.block_table.at(13));
  expect_message([&] { a.run(); }, "page 39 is in block_table twice where new keys are to be written: row 0 of it would be written over");
}

Append good_append() {
  Append a;
  a.k = RowTensor(DType::kF16, {2, 3, 2, 8}), a.v = RowTensor(DType::kF16, {2, 3, 2, 6});
  a.k_cache = RowTensor(DType::kF16, {2, 10, 2, 8}), a.v_cache = RowTensor(DType::kF16, {2, 10, 2, 6});
  a.cos = RowTensor(DType::kF32, {12, 4}), a.sin = RowTensor(DType::kF16, {12, 4});
  a.q = RowTensor(DType::kBF16, {2, 3, 4, 8}), a.q_out = RowTensor(DType::kBF16, {2, 3, 4, 8});
  for (const RowTensor& t : {a.k, a.v, a.cos, a.sin, a.q}) t.fill_normal(1, 1);
  return a;
}

void refused(const Append& good, const std::function<void(Append&)>& change, const std::string& part, const RowOptions& way = {}) {
  Append a = good.copy();
  change(a);
  const Append before = a.copy();
  expect_message([&] { a.run(way); }, part);
  if (a.k_cache.view() && part != "nothing was thrown") {
    EXPECT_TRUE(a.k_cache.same_bits(before.k_cache)) << "written, though it says " << part;
  }
}

TEST(AppendSmall, TensorsThatDoNotFitAreRefusedInWords) {
  const Append good = good_append();
  good.copy().run();
  const auto with = [&](const std::function<void(Append&)>& change, const std::string& part) { refused(good, change, part); };
  with([](Append& a) { a.k = {}; }, "invalid_argument: k is absent; this call needs it");
  with([](Append& a) { a.k = RowTensor(DType::kF16, {6, 2, 8}); }, "k has 3 dimensions; allowed: 4 (batch, seqlen_new, nheads_k, headdim)");
  with(
      [](Append& a) {
        a.v = RowTensor(DType::kF16, {2, 2, 2, 6});
      },
      "v has the shape (2, 2, 2, 6); expected (2, 3, 2, 6), the shape of k, with a headdim");
  with([](Append& a) { a.v = RowTensor(DType::kF64, {2, 3, 2, 6}); }, "v is fp64 but k is fp16; fp64 goes with fp64 alone");
  with([](Append& a) { a.k_cache = RowTensor(DType::kF16, {2, 10, 3, 8}); }, "k_cache has the shape (2, 10, 3, 8); expected (2, 10, 2, 8), nheads_k");
  with([](Append& a) { a.v_cache = RowTensor(DType::kF16, {2, 11, 2, 6}); }, "v_cache has the shape (2, 11, 2, 6); expected (2, 10, 2, 6)");
  with(
      [](Append& a) {
        a.k_cache = RowTensor(DType::kF16, {3, 10, 2, 8});
        a.v_cache = RowTensor(DType::kF16, {3, 10, 2, 6});
      },
      "k_cache has 3 entries and there are 2 sequences; without cache_batch_idx");
  with([](Append& a) { a.cos = {}; }, "one of cos and sin is absent; give both, or neither");
  with([](Append& a) { a.cos = a.sin = {}; }, "q is given without cos and sin, and nothing turns");
  with([](Append& a) { a.cos = a.sin = RowTensor(DType::kF32, {12, 5}); }, "cos has the shape (12, 5), a rotary_dim of 2 * 5, and headdim of k is 8");
  with([](Append& a) { a.q_out = {}; }, "one of q and q_out is absent");
  with([](Append& a) { a.q_out = RowTensor(DType::kF16, {2, 3, 4, 8}); }, "q_out is fp16 but q is bf16; they share one dtype");
  with([](Append& a) { a.q = a.q_out = RowTensor(DType::kBF16, {2, 3, 4, 6}); }, "q has a headdim of 6 and k of 8; they must have the same");
  with([](Append& a) { a.q = a.q_out = RowTensor(DType::kBF16, {3, 3, 4, 8}); }, "q has 3 sequences and k has 2; they must have the same");
  with([](Append& a) { a.q = a.q_out = {}, a.cu_seqlens_q = list(DType::kI32, {0, 1, 2}); }, "cu_seqlens_q is given without q");
  with([](Append& a) { a.cache_seqlens = list(DType::kF32, {0, 0}); }, "cache_seqlens has the dtype fp32 (1); allowed: int32 (5), int64 (7)");
  with(
      [](Append& a) {
        a.cache_seqlens = list(DType::kI32, {0, 0, 0});
      },
      "cache_seqlens has the shape (3); expected (2), a number for each sequence");
  with([](Append& a) { a.cache_seqlens = list(DType::kI32, {0, 0}), a.options.cache_seqlen = 1; }, "cache_seqlen is 1, and cache_seqlens are given");
  with([](Append& a) { a.seqused_k = list(DType::kI64, {0, 0}); }, "seqused_k has the dtype int64 (7)");
  with([](Append& a) { a.status = list(DType::kI32, {0, 0, 0}); }, "status has the shape (3); expected (2)");
  with([](Append& a) { a.seqused_k = a.cache_seqlens = list(DType::kI32, {0, 0}); }, "seqused_k overlaps cache_seqlens in memory");
  with([](Append& a) { a.v_cache = a.v = a.k_cache = RowTensor(DType::kF16, {2, 3, 2, 8}); }, "overlaps");
  with([](Append& a) { a.options.q_positions = static_cast<QueryPositions>(3); }, "q_positions is 3; allowed: 0 (last), 1 (first), 2 (together)");
  with([](Append& a) { a.block_table = RowTensor(DType::kI32, {1, 2}); }, "block_table has the shape (1, 2); allowed: (2, columns)");
  with(
      [](Append& a) {
        a.block_table = RowTensor(DType::kI32, {2, 2}), a.cache_batch_idx = list(DType::kI32, {0, 1});
      },
      "cache_batch_idx is given beside block_table");
  with(
      [](Append& a) {
        a.block_table = RowTensor(DType::kI32, {2, 2});
        a.k_cache = RowTensor(DType::kF16, {2, 0, 2, 8}), a.v_cache = RowTensor(DType::kF16, {2, 0, 2, 6});
      },
      "pages of 0 keys; allowed: at least 1");
  RowOptions way;
  way.backend = Backend::kCuda;
  refused(
      good, [](Append&) {}, "unsupported: backend cuda computes in device memory", way);
  fattn_append_problem p{};
  EXPECT_EQ(fattn_append(nullptr), FATTN_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(fattn_append(&p), FATTN_ERROR_ABI);
  p.struct_size = sizeof p;
  EXPECT_EQ(fattn_append(&p), FATTN_ERROR_ABI);
  p.abi_version = FATTN_ABI_VERSION;
  p.reserved = 1;
  EXPECT_EQ(fattn_append(&p), FATTN_ERROR_INVALID_ARGUMENT);
  EXPECT_STREQ(fattn_last_error(), "problem.reserved is 1; it must be 0: clear the struct before it is filled");
}

// Sizes whose products no number has are of tensors without memory, to which nothing is written.
TEST(AppendSmall, WithoutElements) {
  constexpr int64_t kMany = int64_t{1} << 40;
  const auto none = [](std::initializer_list<int64_t> shape) { return Tensor(nullptr, DType::kF32, shape); };
  for (const Backend backend : {Backend::kAuto, Backend::kReference}) {
    const RowTensor entries = list(DType::kI64, {kMany / 2, 0}), used = list(DType::kI32, {7, 7});
    AppendOptions options;
    options.backend = backend;
    options.cache_batch_idx = entries.view();
    options.seqused_k = used.view();
    append(none({2, 1, 0, 64}), none({2, 1, 0, 64}), none({kMany, 1 << 30, 0, 64}), none({kMany, 1 << 30, 0, 64}), options);
    EXPECT_EQ(used.at(0), 1);
    EXPECT_EQ(used.at(1), 1);
    options = {};
    options.backend = backend;
    const int64_t heads = int64_t{1} << 60;
    append(none({0, 1, heads, 64}), none({0, 1, heads, 64}), none({0, 1, heads, 64}), none({0, 1, heads, 64}), options);
  }
}

TEST(AppendSmall, NumbersOutOfRangeAreRefusedInWords) {
  const Append good = good_append();
  const auto with = [&](const std::function<void(Append&)>& change, const std::string& part) { refused(good, change, part); };
  with([](Append& a) { a.options.cache_seqlen = 8; }, "cache_seqlen is 8, and 3 keys are new; allowed: 0 to 7, for the caches have room for 10");
  with([](Append& a) { a.options.cache_seqlen = -1; }, "cache_seqlen is -1, and 3 keys are new");
  with([](Append& a) { a.cache_seqlens = list(DType::kI32, {7, 8}); }, "cache_seqlens[1] is 8, and 3 keys are new; allowed: 0 to 7");
  with([](Append& a) { a.cache_seqlens = list(DType::kI64, {int64_t{1} << 62, 0}); }, "cache_seqlens[0] is 4611686018427387904");
  with([](Append& a) { a.cache_batch_idx = list(DType::kI32, {0, 2}); }, "cache_batch_idx[1] is 2; allowed: 0 to 1, the entries of k_cache");
  with(
      [](Append& a) {
        a.cache_batch_idx = list(DType::kI32, {1, 1}), a.cache_seqlens = list(DType::kI32, {5, 3});
      },
      "entry 1 is in cache_batch_idx twice, and row 5 of it would be written twice");
  with([](Append& a) { a.cache_batch_idx = list(DType::kI32, {1, 1}), a.cache_seqlens = list(DType::kI32, {6, 3}); }, "nothing was thrown");
  with(
      [](Append& a) {
        a.positions = list(DType::kI32, {9, 10});
      },
      "positions[1] is 10, for a sequence of 3 rows; cos has 12 rows, so that allowed are 0 to 9");
  with(
      [](Append& a) {
        a.q = a.q_out = RowTensor(DType::kBF16, {2, 5, 4, 8});
      },
      "cache_seqlen is 0, so that 5 positions of queries begin at -2, and cos has 12 rows");
  with(
      [](Append& a) {
        a.q = a.q_out = RowTensor(DType::kBF16, {2, 6, 4, 8}), a.options.cache_seqlen = 7, a.options.q_positions = QueryPositions::kFirst;
      },
      "cache_seqlen is 7, so that 6 positions of queries begin at 7, and cos has 12 rows");
  with(
      [](Append& a) {
        a.q = a.q_out = RowTensor(DType::kBF16, {2, 6, 4, 8}), a.options.cache_seqlen = 7, a.options.q_positions = QueryPositions::kTogether;
      },
      "nothing was thrown");
  Append packed = good;
  packed.k = RowTensor(DType::kF16, {6, 2, 8}), packed.v = RowTensor(DType::kF16, {6, 2, 6});
  const auto lists = [&](const std::vector<int64_t>& first, const std::string& part) {
    refused(
        packed, [&](Append& a) { a.cu_seqlens_new = list(DType::kI32, first), a.q = a.q_out = {}; }, part);
  };
  lists({0, 4, 6}, "nothing was thrown");
  lists({1, 4, 6}, "cu_seqlens_new[0] is 1; it must be 0");
  lists({0, 4, 3}, "cu_seqlens_new[2] is 3; allowed: 4, where its sequence begins, to 6, the rows of k");
  lists({0, 4, 7}, "cu_seqlens_new[2] is 7; allowed: 4");
  lists({0, 4}, "k_cache has 2 entries and there are 1 sequences");
  Append paged = good;
  paged.k_cache = RowTensor(DType::kF16, {5, 4, 2, 8}), paged.v_cache = RowTensor(DType::kF16, {5, 4, 2, 6});
  paged.cache_seqlens = list(DType::kI32, {3, 1});
  paged.q = paged.q_out = {};
  const auto table = [&](const std::vector<double>& pages, const std::string& part, const std::vector<int64_t>& lengths = {3, 1}) {
    refused(
        paged,
        [&](Append& a) {
          a.block_table = RowTensor(DType::kI32, {2, 2});
          a.block_table.fill([&](int64_t i) { return pages[static_cast<size_t>(i)]; });
          a.cache_seqlens = list(DType::kI32, lengths);
        },
        part);
  };
  table({0, 1, 2, -1}, "nothing was thrown");
  table({0, 5, 2, -1}, "block_table[0, 1] is 5, and a new key is to be written there; allowed: 0 to 4, the last page of k_cache");
  table({0, -1, 2, -1}, "block_table[0, 1] is -1");
  table({0, 1, 1, -1}, "page 1 is in block_table twice where new keys are to be written: row 1 of it would be written over");
  table({0, 1, 2, 3}, "cache_seqlens[1] is 6, and 3 keys are new; allowed: 0 to 5, for block_table has room for 8, 2 pages of 4", {3, 6});
}

}  // namespace
}  // namespace fattn
