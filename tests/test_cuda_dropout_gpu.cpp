// Dropout of a part of a matrix drops, pair by pair, what the whole matrix drops there: the masks of o, dq, dk and dv are read off where inputs are
// rows of the identity. On the CPU, and on a GPU if there is one.
#include <gtest/gtest.h>

#include <string>

#include "fattn/device.hpp"
#include "gpu_fixture.h"
#include "testing/dropout.h"
#include "testing/run.h"

namespace fattn::testing {
namespace {

using test::CudaGpu;
using test::HopperGpu;

// Heads as many as chunks of headdim rows and keys: head h is asked for chunk h.
constexpr int64_t kChunks = 4;

Case part(DType dtype, int64_t headdim, bool causal) {
  Case c;
  c.dtype = dtype;
  c.batch = 2;
  c.nheads = c.nheads_k = kChunks;
  c.seqlen_q = c.seqlen_k = kChunks * headdim;
  c.headdim = c.headdim_v = headdim;
  c.causal = causal;
  c.p_dropout = 0.5;
  c.dropout_part = true;
  return c;
}

// Row r of head h: e_(r - headdim h), or zeros outside of the head's chunk.
void write_identity(const Tensor& to) {
  const int64_t rows = to.shape(1), heads = to.shape(2), width = to.shape(3);
  Dense values(static_cast<size_t>(to.size()), 0.0);
  for (int64_t n = 0; n < to.shape(0); ++n)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t d = 0; d < width; ++d) values[static_cast<size_t>(((n * rows + h * width + d) * heads + h) * width + d)] = 1;
  write(to, values);
}
void write_all(const Tensor& to, double value) { write(to, Dense(static_cast<size_t>(to.size()), value)); }

void expect_masks(DType dtype, int64_t headdim, bool causal, const Target& target) {
  const Case c = part(dtype, headdim, causal);
  SCOPED_TRACE(std::string(name_of(dtype)) + " " + name_of(target.algorithm) + " headdim " + std::to_string(headdim) + (causal ? " causal" : ""));
  CaseInputs in = make_inputs(c);
  const Options options = options_of(c, target);
  const auto* state = static_cast<const int64_t*>(in.scores.dropout_state.data());
  const Dropout dropout{static_cast<uint64_t>(state[0]), static_cast<uint64_t>(state[1]), c.p_dropout};
  const auto kept = [&](int64_t n, int64_t h, int64_t i, int64_t j) { return dropout.kept(n, c.nheads, h, state[2] + i, state[3] + j) != 0; };
  // Of the pair of row `a` of head h and the chunk's `d`: a query and a key, or the other way round.
  const auto compare = [&](const Dense& x, const char* name, bool of_keys, const auto& stays) {
    ASSERT_EQ(x.size(), static_cast<size_t>(c.batch * c.seqlen_q * c.nheads * headdim)) << name;
    int64_t wrong = 0, pairs = 0;
    for (int64_t n = 0; n < c.batch; ++n)
      for (int64_t a = 0; a < c.seqlen_q; ++a)
        for (int64_t h = 0; h < c.nheads; ++h)
          for (int64_t d = 0; d < headdim; ++d) {
            const int64_t b = h * headdim + d, i = of_keys ? b : a, j = of_keys ? a : b;
            if (causal && (j > i || i < 64)) continue;  // rows that see more have pairs of both kinds
            ++pairs;
            wrong += stays(x[static_cast<size_t>(((n * c.seqlen_q + a) * c.nheads + h) * headdim + d)]) != kept(n, h, i, j);
          }
    EXPECT_GT(pairs, 1000) << name;
    EXPECT_EQ(wrong, 0) << name << ", of " << pairs;
  };
  // Weights are alike: o has those that stay, and so has dv.
  write_all(in.q, 0), write_all(in.k, 0), write_identity(in.v), write_identity(in.dout);
  const Outputs weights = run_passes(c, in, options);
  compare(weights.o, "o", false, [](double x) { return x != 0; });
  compare(weights.dv, "dv", true, [](double x) { return x != 0; });
  // dP is 1, and a row's mean of it, which dS has less, between those of pairs that stay and that do not.
  write_identity(in.q), write_identity(in.k), write_all(in.v, 1.0 / static_cast<double>(headdim)), write_all(in.dout, 1);
  const Outputs gradients = run_passes(c, in, options);
  compare(gradients.dq, "dq", false, [](double x) { return x > 0; });
  compare(gradients.dk, "dk", true, [](double x) { return x > 0; });
}

TEST(DropoutPartsSmall, MasksAreThoseOfTheWholeOnTheCpu) {
  for (const bool causal : {false, true}) {
    expect_masks(DType::kF64, 64, causal, {.backend = Backend::kReference});
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) expect_masks(dtype, 64, causal, {.backend = Backend::kCpu});
  }
}

TEST_F(CudaGpu, MasksOfAPartAreThoseOfTheWhole) {
  for (const Algorithm algorithm : {Algorithm::kV2, Algorithm::kStandard})
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16})
      for (const int64_t headdim : {64, 96, 128, 192, 256})
        for (const bool causal : {false, true}) {
          if (dtype == DType::kF32 && headdim > 192 && algorithm == Algorithm::kV2) continue;  // has no dropout
          expect_masks(dtype, headdim, causal, {.backend = Backend::kCuda, .algorithm = algorithm, .device = Device::kCuda});
        }
}

TEST_F(HopperGpu, MasksOfAPartAreThoseOfTheWholeInV3) {
  for (const DType dtype : {DType::kBF16, DType::kF16})
    for (const int64_t headdim : {64, 96, 128, 192, 256})
      for (const bool causal : {false, true})
        expect_masks(dtype, headdim, causal, {.backend = Backend::kCuda, .algorithm = Algorithm::kV3, .device = Device::kCuda});
}

}  // namespace
}  // namespace fattn::testing
