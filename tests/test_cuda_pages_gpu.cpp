// Paged caches on a GPU: the bits of keys side by side, and numbers of pages that are none.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "fattn/plan.hpp"
#include "gpu_fixture.h"
#include "testing/pages.h"
#include "testing/run.h"

namespace fattn::testing {
namespace {

using test::CudaGpu;

Case in_pages(DType dtype, int64_t page_size, int64_t seqlen_q, int64_t headdim = 64) {
  Case c;
  c.dtype = dtype;
  c.batch = 3;
  c.seqlen_q = seqlen_q;
  c.seqlen_k = (700 + page_size - 1) / page_size * page_size;
  c.nheads = 6;
  c.nheads_k = 2;
  c.headdim = c.headdim_v = headdim;
  c.causal = c.key_lengths = true;
  c.backward = false;
  c.page_size = page_size;
  return c;
}

Options on_gpu(const Case& c, int cuda_level = 0) {
  Target target;
  target.backend = Backend::kCuda;
  target.algorithm = Algorithm::kV2;
  target.cuda_level = cuda_level;
  return options_of(c, target);
}

// The tensor, contiguous, in memory of the case's own.
Tensor placed(CaseInputs& in, const Tensor& t) {
  std::vector<int64_t> strides(4, 1);
  for (int i = t.ndim() - 2; i >= 0; --i) strides[static_cast<size_t>(i)] = strides[static_cast<size_t>(i) + 1] * t.shape(i + 1);
  TensorBlock& block = in.blocks.emplace_back(t.dtype(), t.size(), 0, TensorBlock::kUnwritten);
  const auto at = [&] {
    switch (t.ndim()) {
      case 1: return block.place(0, {t.shape(0)}, {1});
      case 3: return block.place(0, {t.shape(0), t.shape(1), t.shape(2)}, {strides[0], strides[1], 1});
      default: return block.place(0, {t.shape(0), t.shape(1), t.shape(2), t.shape(3)}, {strides[0], strides[1], strides[2], 1});
    }
  }();
  if (t.size() > 0) std::memcpy(at.data(), t.data(), static_cast<size_t>(t.size()) * size_of(t.dtype()));
  return at;
}

void expect_bits_of_keys_side_by_side(Case c, int cuda_level = 0) {
  for (const Layout layout : {Layout::kBshd, Layout::kBhsd, Layout::kPadded}) {
    c.layout = layout;
    CaseInputs in = make_inputs(c);
    Options options = on_gpu(c, cuda_level);
    const Unpaged keys(in.k, in.v, in.scores);
    const Outputs got = run_passes(c, in, options);
    in.k = placed(in, keys.k());
    in.v = placed(in, keys.v());
    in.scores = keys.scores();
    if (c.varlen) {
      in.scores.cu_seqlens_k = placed(in, keys.scores().cu_seqlens_k);
      options.max_seqlen_k = c.seqlen_k;
    }
    if (layout == Layout::kPadded) continue;  // another kernel, of rows at any address: only that it runs
    EXPECT_TRUE(same_bits(got, run_passes(c, in, options))) << name_of(c);
  }
}

TEST_F(CudaGpu, PagesChangeNoBit) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32})
    for (const int64_t page_size : {1, 3, 16, 24, 128, 512})
      for (const int64_t seqlen_q : {1, 5, 40, 150}) expect_bits_of_keys_side_by_side(in_pages(dtype, page_size, seqlen_q));
  for (const int64_t headdim : {40, 128, 192, 256})
    for (const int64_t seqlen_q : {1, 150}) expect_bits_of_keys_side_by_side(in_pages(DType::kBF16, 16, seqlen_q, headdim));
  expect_bits_of_keys_side_by_side(in_pages(DType::kF16, 16, 150), 75);
}
TEST_F(CudaGpu, PagesChangeNoBitOfWhatElseScoresDependOn) {
  for (const DType dtype : {DType::kBF16, DType::kF32})
    for (const int64_t seqlen_q : {5, 150}) {
      Case c = in_pages(dtype, 16, seqlen_q);
      c.window_left = 50;
      expect_bits_of_keys_side_by_side(c);
      c.inputs = Inputs::kSpoiltValues;
      expect_bits_of_keys_side_by_side(c);
      c.inputs = Inputs::kNormal;
      c.softcap = 4;
      c.sinks = true;
      expect_bits_of_keys_side_by_side(c);
      c.varlen = true;
      expect_bits_of_keys_side_by_side(c);
      c.alibi = Alibi::kHeads;
      c.p_dropout = 0.3;
      c.mask = Pairs::kHeads;
      expect_bits_of_keys_side_by_side(c);
    }
}

// Numbers in every page: those that no entry has are NaN at first.
void fill_pages(CaseInputs& in) {
  for (Tensor* t : {&in.k, &in.v}) {
    Dense values(static_cast<size_t>(t->size()));
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(i * 37 % 101) / 50 - 1;
    write(*t, values);
  }
}

// What an entry has of an output: rows of o, or of lse.
struct Share {
  int64_t numbers = 0, nans = 0;
};
Share share_of(const Dense& values, const Tensor& like, int64_t entry) {
  const int64_t each = like.size() / like.shape(0);
  Share s;
  for (int64_t i = entry * each; i < (entry + 1) * each; ++i) ++(std::isnan(values[static_cast<size_t>(i)]) ? s.nans : s.numbers);
  return s;
}

// Numbers that are no page's, or lengths that the table has no room for: nothing is read by them, all of their entry is NaN, and no bit of the
// others changes. Of entry 1 the last page is bad, which most rows do not see, of entry 2 the first. Of entry 3 the length is, which to the others is
// one of 0: they share the device by their lengths.
TEST_F(CudaGpu, BadPagesGiveNanToTheirEntryAlone) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32})
    for (const int64_t page_size : {1, 16, 100})
      for (const int64_t seqlen_q : {1, 40, 300})
        for (const int32_t bad : {-1, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()})
          for (const bool sinks : {false, true}) {
            Case c = in_pages(dtype, page_size, seqlen_q);
            c.batch = 5;
            c.sinks = sinks;
            CaseInputs in = make_inputs(c);
            fill_pages(in);
            auto* const lengths = static_cast<int32_t*>(in.scores.seqused_k.data());
            auto* const table = static_cast<int32_t*>(in.scores.block_table.data());
            const int64_t row = in.scores.block_table.stride(0), columns = in.scores.block_table.shape(1);
            for (int64_t n = 0; n < c.batch; ++n) {
              lengths[n] = static_cast<int32_t>(n == 3 ? 0 : c.seqlen_k - (n == 0 ? page_size : 0));
              for (int64_t i = 0; i < columns; ++i) table[n * row + i] = static_cast<int32_t>((3 * i + n) % in.k.shape(0));
            }
            table[columns - 1] = bad;  // of no key
            const Outputs good = run_passes(c, in, on_gpu(c));
            table[row + columns - 1] = bad;
            table[2 * row] = bad == std::numeric_limits<int32_t>::max() ? static_cast<int32_t>(in.k.shape(0)) : bad;
            lengths[3] = bad;
            const Outputs got = run_passes(c, in, on_gpu(c));
            const CaseForward like = make_forward(c);
            SCOPED_TRACE(name_of(c) + ", bad " + std::to_string(bad));
            for (int64_t n = 0; n < c.batch; ++n) {
              const bool is_bad = n >= 1 && n <= 3;
              for (const auto& [values, before, tensor] : {std::tuple{&got.o, &good.o, &like.o}, {&got.lse, &good.lse, &like.lse}}) {
                const Share s = share_of(*values, *tensor, n);
                EXPECT_EQ(is_bad ? s.numbers : s.nans, 0) << "entry " << n;
                const int64_t each = tensor->size() / c.batch;
                const auto begin = static_cast<std::ptrdiff_t>(n * each), end = static_cast<std::ptrdiff_t>((n + 1) * each);
                if (is_bad) continue;
                const Dense now(values->begin() + begin, values->begin() + end), then(before->begin() + begin, before->begin() + end);
                EXPECT_TRUE(same_bits(now, then)) << "entry " << n;
              }
            }
          }
}

// Of packed queries, too; and what a caller who asks is told.
TEST_F(CudaGpu, BadPagesOfPackedQueriesAreToldOf) {
  for (const DType dtype : {DType::kBF16, DType::kF32})
    for (const int32_t entry : {0, 2}) {
      Case c = in_pages(dtype, 16, 70);
      c.varlen = true;
      CaseInputs in = make_inputs(c);
      fill_pages(in);
      const Dense offsets = read(in.scores.cu_seqlens_q);
      auto* const lengths = static_cast<int32_t*>(in.scores.seqused_k.data());
      for (int64_t n = 0; n < c.batch; ++n) lengths[n] = 30;
      auto* const table = static_cast<int32_t*>(in.scores.block_table.data());
      const int64_t row = in.scores.block_table.stride(0);
      for (int64_t n = 0; n < c.batch; ++n) table[n * row] = 0, table[n * row + 1] = 1;
      const Outputs good = run_passes(c, in, on_gpu(c));
      table[entry * row + 1] = static_cast<int32_t>(in.k.shape(0));
      in.scores.status = in.blocks.emplace_back(DType::kI32, 2, 0, TensorBlock::kUnwritten).place(0, {2}, {1});
      const Outputs got = run_passes(c, in, on_gpu(c));
      const int64_t each = c.nheads * c.headdim_v;
      for (int64_t n = 0; n < c.batch; ++n)
        for (int64_t i = static_cast<int64_t>(offsets[static_cast<size_t>(n)]) * each;
             i < static_cast<int64_t>(offsets[static_cast<size_t>(n) + 1]) * each; ++i) {
          const double value = got.o[static_cast<size_t>(i)], before = good.o[static_cast<size_t>(i)];
          ASSERT_TRUE(n == entry ? std::isnan(value) : value == before) << "sequence " << n << ", element " << i;
        }
      Options options = on_gpu(c);
      options.check = Check::kSync;
      try {
        run_passes(c, in, options);
        FAIL() << "a bad page was taken";
      } catch (const Error& e) {
        EXPECT_NE(std::string(e.what()).find("block_table[" + std::to_string(entry) + ", 1] is"), std::string::npos) << e.what();
      }
    }
}

TEST_F(CudaGpu, TheStatusSaysWhichEntryHasABadPage) {
  cuda::Buffer k(0, 1 << 20), q(0, 1 << 20), lists(0, 4096);
  const auto at = [](const cuda::Buffer& memory, DType dtype, std::initializer_list<int64_t> shape, int64_t offset = 0) {
    return Tensor(nullptr, dtype, shape).on(Device::kCuda, 0, static_cast<char*>(memory.get()) + offset);
  };
  k.fill(0x3c);
  q.fill(0x3c);
  ForwardTensors t;
  t.q = at(q, DType::kBF16, {3, 1, 4, 64});
  t.o = at(q, DType::kBF16, {3, 1, 4, 64}, 1 << 16);
  t.k = t.v = at(k, DType::kBF16, {8, 16, 2, 64});
  t.scores.block_table = at(lists, DType::kI32, {3, 4});
  t.scores.seqused_k = at(lists, DType::kI32, {3}, 1024);
  t.scores.status = at(lists, DType::kI32, {2}, 2048);
  const auto status_of = [&](std::vector<int32_t> table, std::vector<int32_t> lengths) {
    lists.copy_from(table.data(), 4 * table.size());
    lists.copy_from(lengths.data(), 4 * lengths.size(), nullptr, 1024);
    Options options;
    options.backend = Backend::kCuda;
    forward(t, options);
    std::vector<int32_t> status(2);
    check(fattn_cuda_copy(0, FATTN_COPY_TO_HOST, status.data(), t.scores.status.data(), 8, nullptr));
    return status;
  };
  EXPECT_EQ(status_of({0, 1, 2, 3, 4, 5, -1, 8, 7, -1, -1, -1}, {64, 32, 16}), (std::vector<int32_t>{FATTN_LISTS_GOOD, 0}));
  EXPECT_EQ(status_of({0, 1, 2, 3, 4, 5, -1, 8, 7, -1, -1, -1}, {64, 33, 17}), (std::vector<int32_t>{FATTN_LIST_BLOCK_TABLE, 1}));
  EXPECT_EQ(status_of({0, 1, 2, 3, 4, 5, -1, 8, 8, -1, -1, -1}, {64, 32, 1}), (std::vector<int32_t>{FATTN_LIST_BLOCK_TABLE, 2}));
  EXPECT_EQ(status_of({0, 1, 2, -3, 4, 5, -1, 8, 8, -1, -1, -1}, {65, 32, 1}), (std::vector<int32_t>{FATTN_LIST_SEQUSED_K, 0}));
}

}  // namespace
}  // namespace fattn::testing
