// Decode on a GPU where sequences have different lengths, which the device shares among CTAs: against the oracle, and the same bits again.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "fattn/attention.hpp"
#include "gpu_fixture.h"
#include "testing/run.h"

namespace fattn::testing {
namespace {

using test::CudaGpu;

Case of_many(DType dtype, int64_t batch, int64_t seqlen_k, int64_t seqlen_q, int64_t headdim, int64_t page_size) {
  Case c;
  c.dtype = dtype;
  c.batch = batch;
  c.seqlen_q = seqlen_q;
  c.seqlen_k = seqlen_k;
  c.nheads = 6;
  c.nheads_k = 2;
  c.headdim = c.headdim_v = headdim;
  c.causal = c.key_lengths = true;
  c.backward = false;
  c.page_size = page_size;
  return c;
}

Options on_gpu(const Case& c) {
  Target target;
  target.backend = Backend::kCuda;
  target.algorithm = Algorithm::kV2;
  return options_of(c, target);
}

int below(std::mt19937& random, int64_t n) { return static_cast<int>(random() % static_cast<unsigned>(n)); }

// Lengths from 0 to all keys, few and many, and numbers in all keys that there is room for; pages in an order of their own.
void draw(CaseInputs& in, const Case& c, std::mt19937& random) {
  for (Tensor* t : {&in.k, &in.v}) {
    Dense values(static_cast<size_t>(t->size()));
    std::normal_distribution<double> normal;
    for (double& value : values) value = normal(random);
    write(*t, values);
  }
  auto* const lengths = static_cast<int32_t*>(in.scores.seqused_k.data());
  for (int64_t b = 0; b < c.batch; ++b) {
    const int kind = below(random, 6);
    lengths[b] = kind == 0 ? 0 : kind == 1 ? static_cast<int>(c.seqlen_k) : kind == 2 ? below(random, 70) : below(random, c.seqlen_k + 1);
  }
  if (c.page_size == 0) return;
  const Tensor& table = in.scores.block_table;
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t i = 0; i < table.shape(1); ++i) static_cast<int32_t*>(table.data())[b * table.stride(0) + i] = below(random, in.k.shape(0));
}

TEST_F(CudaGpu, DecodeOfAnyLengthsIsRight) {
  std::mt19937 random(1);
  struct Shape {
    int64_t batch, seqlen_k, seqlen_q, headdim;
    DType dtype = DType::kBF16;
    bool sinks = false;
  };
  const Shape shapes[] = {{2, 4096, 1, 128},
                          {9, 3008, 1, 128},
                          {70, 512, 1, 128},
                          {33, 1008, 1, 64},
                          {5, 2000, 3, 256},
                          {3, 2048, 40, 64},
                          {4, 1504, 7, 96, DType::kF16, true}};
  for (const Shape& s : shapes)
    for (const int64_t page_size : {0, 16, 1})
      for (int turn = 0; turn < 3; ++turn) {
        Case c = of_many(s.dtype, s.batch, s.seqlen_k, s.seqlen_q, s.headdim, page_size);
        c.sinks = s.sinks;
        CaseInputs in = make_inputs(c);
        draw(in, c, random);
        const Outputs got = run_passes(c, in, on_gpu(c));
        SCOPED_TRACE(name_of(c));
        EXPECT_TRUE(same_bits(got, run_passes(c, in, on_gpu(c))));
        CaseForward out = make_forward(c);
        write(out.o, got.o);
        write(out.lse, got.lse);
        ForwardTensors t;
        t.q = in.q, t.k = in.k, t.v = in.v, t.o = out.o, t.lse = out.lse, t.scores = in.scores;
        for (const TensorVerdict& verdict : verify(t, on_gpu(c))) EXPECT_TRUE(verdict.pass) << verdict.tensor << ": " << verdict.message;
      }
}

// A length that is out of range is of a sequence without keys to all others, whose bits it does not change; its own rows are NaN.
TEST_F(CudaGpu, ABadLengthIsNanAmongAnyLengths) {
  std::mt19937 random(2);
  for (const int64_t page_size : {0, 16})
    for (const int64_t batch : {2, 40})
      for (const int32_t bad : {-1, 1601}) {
        const Case c = of_many(DType::kBF16, batch, 1600, 1, 128, page_size);
        CaseInputs in = make_inputs(c);
        draw(in, c, random);
        const int64_t entry = batch - 1;
        auto* const length = static_cast<int32_t*>(in.scores.seqused_k.data()) + entry;
        *length = 0;
        const Outputs empty = run_passes(c, in, on_gpu(c));
        *length = bad;
        const Outputs got = run_passes(c, in, on_gpu(c));
        SCOPED_TRACE(name_of(c) + ", length " + std::to_string(bad));
        for (const auto& [now, before] : {std::pair{&got.o, &empty.o}, {&got.lse, &empty.lse}}) {
          const auto begin = static_cast<std::ptrdiff_t>(now->size() / static_cast<size_t>(batch) * static_cast<size_t>(entry));
          EXPECT_TRUE(same_bits(Dense(now->begin(), now->begin() + begin), Dense(before->begin(), before->begin() + begin)));
          EXPECT_TRUE(std::all_of(now->begin() + begin, now->end(), [](double x) { return std::isnan(x); }));
          EXPECT_TRUE(std::none_of(before->begin() + begin, before->end(), [](double x) { return std::isnan(x); }));
        }
      }
}

}  // namespace
}  // namespace fattn::testing
