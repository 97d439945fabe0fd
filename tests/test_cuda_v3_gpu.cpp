// Hopper's kernels (algorithm v3) on a real GPU, where a multiprocessor computes many tiles of many blocks, which the table of cases is too small
// for. Skipped on any other GPU, and without one; on Hopper a problem that v3 refuses is a failure.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "fattn/attention.hpp"
#include "fattn/device.hpp"
#include "fattn/plan.hpp"
#include "gpu_fixture.h"
#include "gpu_problem.h"
#include "testing/cases.h"
#include "unit_of.h"

namespace fattn {
namespace {

using test::CudaGpu;
using test::DeviceForward;
using test::difference;
using test::fill_with_noise;
using test::halves;
using test::on_cuda;
using test::shape;
using test::taken;
using testing::Case;

using CudaV3Gpu = test::HopperGpu;

// What docs/NUMERICS.md promises of fp32 for numbers of about N(0, 1), as noise is: so far a result may be from standard attention, and so from
// float64, over the largest magnitude or over 1 (`difference`). An lse is fp32 of exact products in 16 bits, too. testing/check.h holds smaller
// problems to the oracle, which takes too long for these.
constexpr double kPromisedInF32 = 1e-5;
// Two algorithms may each be off by as much, in opposite directions.
constexpr double kApartInF32 = 2 * kPromisedInF32;

// How far apart results of two algorithms in 16 bits may be (`difference`): each rounds, by half a unit in the last place of numbers as large as the
// largest, its result and what is multiplied before it: weights, and of dq and dk dS, which is made of weights and an o that were rounded.
constexpr int kOfO = 2, kOfGradients = 3;
double apart(DType dtype, int roundings) { return 2 * roundings * test::unit_of(dtype); }

// The largest of the differences; NaN if there is one.
double worst_difference(std::initializer_list<std::pair<Tensor, Tensor>> pairs) {
  double most = 0;
  for (const auto& [a, b] : pairs) {
    const double now = difference(a, b);
    if (std::isnan(now)) return now;
    most = std::max(most, now);
  }
  return most;
}

// fp32 against v2's, which multiplies parts as well, but sums otherwise; and rows that are not aligned give the same bits as others.
TEST_F(CudaV3Gpu, Fp32AgreesWithV2OverManyTiles) {
  for (const auto& [headdim, headdim_v] : {std::pair<int64_t, int64_t>{64, 64}, {128, 128}, {64, 128}, {96, 96}, {20, 50}})
    for (const bool causal : {false, true}) {
      Case c = shape(DType::kF32, 3, 1030, 1300, 24, 8, headdim, causal);
      c.headdim_v = headdim_v;
      DeviceForward d(c), skewed(c, 1), other(c);
      uint32_t seed = 1;
      for (const Tensor& t : {d.t.q, d.t.k, d.t.v}) fill_with_noise(t, seed++);
      seed = 1;
      for (const Tensor& t : {skewed.t.q, skewed.t.k, skewed.t.v}) fill_with_noise(t, seed++);
      ForwardTensors v2 = d.t;
      v2.o = other.t.o, v2.lse = other.t.lse;
      for (const double scale : {1 / std::sqrt(static_cast<double>(headdim)), 2.0}) {
        Options options = on_cuda(c);
        options.softmax_scale = scale;
        options.algorithm = Algorithm::kV3;
        ASSERT_TRUE(taken(describe(d.t, options)));
        forward(d.t, options);
        forward(skewed.t, options);
        options.algorithm = Algorithm::kV2;
        forward(v2, options);
        EXPECT_LT(difference(d.t.o, v2.o), kApartInF32) << headdim << " " << causal << " " << scale;
        EXPECT_LT(difference(d.t.lse, v2.lse), kApartInF32) << headdim << " " << causal << " " << scale;
        EXPECT_EQ(difference(d.t.o, skewed.t.o), 0) << headdim << " " << causal << " " << scale;
      }
    }
}

// Scores of 2^60 and more, where a reference in fp32 says nothing about what is left of a score: each row is its greatest key's value, as in v2.
TEST_F(CudaV3Gpu, Fp32TakesScoresOfAnySize) {
  constexpr int64_t kRows = 100, kKeys = 300, kWidth = 64;
  const Case c = shape(DType::kF32, 1, kRows, kKeys, 1, 1, kWidth, false);
  DeviceForward d(c);
  uint32_t seed = 1;
  for (const Tensor& t : {d.t.q, d.t.k, d.t.v}) fill_with_noise(t, seed++);
  std::vector<float> q = test::numbers(d.t.q);
  const std::vector<float> k = test::numbers(d.t.k), v = test::numbers(d.t.v);
  for (float& x : q) x *= 0x1p60f;
  check(fattn_cuda_copy(0, FATTN_COPY_TO_DEVICE, d.t.q.data(), q.data(), 4 * q.size(), nullptr));
  for (const Algorithm algorithm : {Algorithm::kV2, Algorithm::kV3}) {
    Options options = on_cuda(c);
    options.algorithm = algorithm;
    ASSERT_TRUE(taken(describe(d.t, options)));
    forward(d.t, options);
    const std::vector<float> o = test::numbers(d.t.o), lse = test::numbers(d.t.lse);
    for (size_t row = 0; row < kRows; ++row) {
      double greatest = -HUGE_VAL;
      size_t at = 0;
      for (size_t key = 0; key < kKeys; ++key) {
        double score = 0;
        for (size_t i = 0; i < kWidth; ++i) score += static_cast<double>(q[row * kWidth + i]) * k[key * kWidth + i];
        if (score > greatest) greatest = score, at = key;
      }
      EXPECT_NEAR(lse[row] / (greatest / 8), 1, kPromisedInF32) << row;
      for (size_t i = 0; i < kWidth; ++i) ASSERT_EQ(o[row * kWidth + i], v[at * kWidth + i]) << name_of(algorithm) << " " << row << " " << i;
    }
  }
}

// Keys of 1e17 beside keys of 1, of which parts in units of the block's greatest leave nothing: rows that do not see the large ones, or whose scores
// with them are far below 0, are those of the small ones.
TEST_F(CudaV3Gpu, Fp32TakesKeysOfVeryDifferentSize) {
  constexpr size_t kRows = 150, kKeys = 300;
  for (const size_t width : {size_t{64}, size_t{128}})
    for (const bool causal : {false, true}) {
      const Case c = shape(DType::kF32, 1, kRows, kKeys, 1, 1, static_cast<int64_t>(width), causal);
      DeviceForward d(c);
      uint32_t seed = 1;
      for (const Tensor& t : {d.t.q, d.t.k, d.t.v}) fill_with_noise(t, seed++);
      const std::vector<float> q = test::numbers(d.t.q), v = test::numbers(d.t.v);
      std::vector<float> k = test::numbers(d.t.k);
      for (const size_t key : {40, 170, 290})
        for (size_t i = 0; i < width; ++i) k[key * width + i] *= 1e17f;
      check(fattn_cuda_copy(0, FATTN_COPY_TO_DEVICE, d.t.k.data(), k.data(), 4 * k.size(), nullptr));
      Options options = on_cuda(c);
      options.algorithm = Algorithm::kV3;
      ASSERT_TRUE(taken(describe(d.t, options)));
      forward(d.t, options);
      const std::vector<float> o = test::numbers(d.t.o), lse = test::numbers(d.t.lse);
      int small = 0;  // rows that the large keys have no part in
      for (size_t row = 0; row < kRows; ++row) {
        const size_t end = causal ? row + 1 + kKeys - kRows : kKeys;
        std::vector<double> scores(end), wanted(width);
        double greatest = -HUGE_VAL, sum = 0, terms = 0;  // terms: of the greatest score
        for (size_t key = 0; key < end; ++key) {
          double absolute = 0;
          for (size_t i = 0; i < width; ++i) {
            const double product = static_cast<double>(q[row * width + i]) * k[key * width + i];
            scores[key] += product;
            absolute += std::fabs(product);
          }
          scores[key] /= std::sqrt(static_cast<double>(width));
          if (scores[key] > greatest) greatest = scores[key], terms = absolute / std::sqrt(static_cast<double>(width));
        }
        for (size_t key = 0; key < end; ++key) {
          const double weight = std::exp(scores[key] - greatest);
          sum += weight;
          for (size_t i = 0; i < width; ++i) wanted[i] += weight * v[key * width + i];
        }
        small += greatest < 100;
        const double expected = greatest + std::log(sum);
        EXPECT_NEAR(lse[row], expected, kPromisedInF32 + 0x1p-22 * terms) << width << " " << causal << " " << row;
        for (size_t i = 0; i < width; ++i)
          ASSERT_NEAR(o[row * width + i], wanted[i] / sum, kPromisedInF32) << width << " " << causal << " " << row << " " << i;
      }
      EXPECT_GT(small, 5);
    }
}

// The backward pass in fp32 whose queries are split by a kernel before, over many tiles; a deterministic one splits them block by block. On any GPU.
TEST_F(CudaGpu, Fp32BackwardWithQueriesSplitBefore) {
  for (const auto& [headdim, headdim_v] : {std::pair<int64_t, int64_t>{64, 64}, {128, 128}, {96, 96}, {64, 128}, {20, 50}})
    for (const bool causal : {false, true}) {
      Case c = shape(DType::kF32, 2, 1030, 700, 6, 2, headdim, causal);
      c.headdim_v = headdim_v;
      DeviceForward d(c), gradient(c), ours(c), other(c);  // dq, dk and dv have the places of q, k and v
      uint32_t seed = 1;
      for (const Tensor& t : {d.t.q, d.t.k, d.t.v, gradient.t.o}) fill_with_noise(t, seed++);
      Options options = on_cuda(c);
      forward(d.t, options);
      const auto backward_to = [&](const ForwardTensors& to) {
        backward({d.t.q, d.t.k, d.t.v, d.t.o, d.t.lse, gradient.t.o, to.q, to.k, to.v}, options);
      };
      backward_to(ours.t);
      options.deterministic = true;
      backward_to(other.t);
      EXPECT_LT(difference(ours.t.q, other.t.q), kPromisedInF32) << headdim << " " << causal;
      EXPECT_LT(difference(ours.t.k, other.t.k), kPromisedInF32) << headdim << " " << causal;
      EXPECT_LT(difference(ours.t.v, other.t.v), kPromisedInF32) << headdim << " " << causal;
    }
}

// Against v2's: rings of stages go round, tiles are joined, warpgroups skip blocks; with a scale of 2 weights leave their window.
TEST_F(CudaV3Gpu, AgreesWithV2OverManyTiles) {
  for (const int64_t headdim : {64, 96, 128, 192, 256})
    for (const bool causal : {false, true}) {
      const Case c = shape(headdim == 96 ? DType::kF16 : DType::kBF16, 3, 1030, 1300, 24, 8, headdim, causal);
      DeviceForward d(c);
      uint32_t seed = 1;
      for (const Tensor& t : {d.t.q, d.t.k, d.t.v}) fill_with_noise(t, seed++);
      DeviceForward other(c);
      ForwardTensors v2 = d.t;
      v2.o = other.t.o, v2.lse = other.t.lse;
      for (const double scale : {1 / std::sqrt(static_cast<double>(headdim)), 2.0}) {
        Options options = on_cuda(c);
        options.softmax_scale = scale;
        options.algorithm = Algorithm::kV3;
        ASSERT_TRUE(taken(describe(d.t, options)));
        forward(d.t, options);
        options.algorithm = Algorithm::kV2;
        forward(v2, options);
        EXPECT_LT(difference(d.t.o, v2.o), apart(c.dtype, kOfO)) << headdim << " " << causal << " " << scale;
        EXPECT_LT(difference(d.t.lse, v2.lse), kPromisedInF32) << headdim << " " << causal << " " << scale;
      }
    }
}

// Windows narrower and wider than tiles, on both sides and aligned to blocks or not: warpgroups pass over blocks or multiply a half of them, and
// tiles are joined where they do.
TEST_F(CudaV3Gpu, WindowsAgreeWithV2OverManyTiles) {
  constexpr std::pair<int64_t, int64_t> kWindows[] = {{0, 0}, {63, 0}, {64, 70}, {127, 0}, {300, 0}, {511, -1}, {640, 5}, {-1, 40}, {1023, 0}};
  for (const int64_t headdim : {64, 96, 128, 192, 256})
    for (const auto& [left, right] : kWindows)
      for (const auto& [seqlen_q, seqlen_k] : {std::pair{1536, 1536}, {1030, 1300}, {1300, 1030}}) {
        Case c = shape(headdim == 96 ? DType::kF16 : DType::kBF16, 2, seqlen_q, seqlen_k, 16, 8, headdim, false);
        c.window_left = left;
        c.window_right = right;
        DeviceForward d(c), other(c);
        uint32_t seed = 1;
        for (const Tensor& t : {d.t.q, d.t.k, d.t.v}) fill_with_noise(t, seed++);
        ForwardTensors v2 = d.t;
        v2.o = other.t.o, v2.lse = other.t.lse;
        Options options = on_cuda(c);
        options.algorithm = Algorithm::kV3;
        ASSERT_TRUE(taken(describe(d.t, options)));
        forward(d.t, options);
        options.algorithm = Algorithm::kV2;
        forward(v2, options);
        EXPECT_LT(difference(d.t.o, v2.o), apart(c.dtype, kOfO)) << headdim << " " << left << " " << right << " " << seqlen_q;
        EXPECT_LT(difference(d.t.lse, v2.lse), kPromisedInF32) << headdim << " " << left << " " << right << " " << seqlen_q;
      }
}

// The same with what depends on pairs: rings of bits go round beside those of keys and values, in tiles that a mask makes short and long.
TEST_F(CudaV3Gpu, AlibiAndDropoutAgreeWithV2OverManyTiles) {
  for (const int64_t headdim : {64, 128, 256})
    for (const bool causal : {false, true})
      for (const bool lengths : {false, true}) {
        const Case c = shape(headdim == 64 ? DType::kF16 : DType::kBF16, 5, 1030, 1300, 24, 8, headdim, causal);
        DeviceForward d(c);
        uint32_t seed = 1;
        for (const Tensor& t : {d.t.q, d.t.k, d.t.v}) fill_with_noise(t, seed++);
        cuda::Buffer memory(0, 1024);
        std::array<float, 24> slopes{};
        for (size_t i = 0; i < slopes.size(); ++i) slopes[i] = std::exp2(-static_cast<float>(i + 1) / 3);
        const std::array<int64_t, 2> state{0x123456789abcdef, (int64_t{5} << 32) - 7};  // the stream's high word changes among the heads
        const std::array<int32_t, 5> keys{1300, 1291, 1100, 1299, 1050};
        memory.copy_from(slopes.data(), sizeof slopes);
        memory.copy_from(state.data(), sizeof state, nullptr, 256);
        memory.copy_from(keys.data(), sizeof keys, nullptr, 512);
        const auto at = [&](DType dtype, int64_t count, int64_t offset) {
          return Tensor(nullptr, dtype, {count}).on(Device::kCuda, 0, static_cast<char*>(memory.get()) + offset);
        };
        if (headdim < 256 && !lengths) d.t.scores.alibi_slopes = at(DType::kF32, 24, 0);  // elsewhere v3 refuses both together
        d.t.scores.dropout_state = at(DType::kI64, 2, 256);
        if (lengths) d.t.scores.seqused_k = at(DType::kI32, 5, 512);
        DeviceForward other(c);
        ForwardTensors v2 = d.t;
        v2.o = other.t.o, v2.lse = other.t.lse;
        for (const double scale : {1 / std::sqrt(static_cast<double>(headdim)), 1.0}) {
          Options options = on_cuda(c);
          options.softmax_scale = scale;
          options.p_dropout = 0.2;
          options.algorithm = Algorithm::kV3;
          ASSERT_TRUE(taken(describe(d.t, options)));
          for (int run = 0; run < 3; ++run) forward(d.t, options);
          options.algorithm = Algorithm::kV2;
          forward(v2, options);
          EXPECT_LT(difference(d.t.o, v2.o), apart(c.dtype, kOfGradients)) << headdim << " " << causal << " " << lengths << " " << scale;
          EXPECT_LT(difference(d.t.lse, v2.lse), kPromisedInF32) << headdim << " " << causal << " " << lengths << " " << scale;
        }
      }
}

// The forward pass of v3, three times, against v2's, which `other` takes. Returns v2's.
ForwardTensors compare_forward(const Case& c, const DeviceForward& d, const DeviceForward& other) {
  ForwardTensors v2 = d.t;
  v2.o = other.t.o, v2.lse = other.t.lse;
  Options options = on_cuda(c);
  options.algorithm = Algorithm::kV3;
  EXPECT_TRUE(taken(describe(d.t, options)));
  for (int run = 0; run < 3; ++run) forward(d.t, options);
  options.algorithm = Algorithm::kV2;
  forward(v2, options);
  EXPECT_LT(difference(d.t.o, v2.o), apart(c.dtype, kOfO));
  EXPECT_LT(difference(d.t.lse, v2.lse), kPromisedInF32);
  return v2;
}

// Both passes, likewise. Of `gradients` o is dout, and the rest takes v3's.
void compare_both_passes(const Case& c, const DeviceForward& d, const DeviceForward& other, const DeviceForward& gradients) {
  const ForwardTensors v2 = compare_forward(c, d, other);
  Options options = on_cuda(c);
  options.algorithm = Algorithm::kV2;
  BackwardTensors both{v2.q, v2.k, v2.v, v2.o, v2.lse, gradients.t.o, gradients.t.q, gradients.t.k, gradients.t.v, v2.scores}, by_v2 = both;
  by_v2.dq = other.t.q, by_v2.dk = other.t.k, by_v2.dv = other.t.v;
  backward(by_v2, options);
  options.algorithm = Algorithm::kV3;
  ASSERT_TRUE(taken(describe(both, options)));
  for (int run = 0; run < 3; ++run) backward(both, options);
  EXPECT_LT(difference(both.dq, by_v2.dq), apart(c.dtype, kOfGradients));
  EXPECT_LT(difference(both.dk, by_v2.dk), apart(c.dtype, kOfGradients));
  EXPECT_LT(difference(both.dv, by_v2.dv), apart(c.dtype, kOfGradients));
}

// Both passes, documents of any length, in runs and of ids in any order, over many tiles: some blocks are skipped, others hide pairs, or nothing.
TEST_F(CudaV3Gpu, DocumentsAgreeWithV2OverManyTiles) {
  for (const int64_t headdim : {64, 128, 256})
    for (const bool causal : {false, true}) {
      const Case c = shape(headdim == 64 ? DType::kF16 : DType::kBF16, 3, 2030, 2300, 16, 4, headdim, causal);
      DeviceForward d(c), other(c), gradients(c);
      const Tensor dout = gradients.t.o;
      uint32_t seed = 1;
      for (const Tensor& t : {d.t.q, d.t.k, d.t.v, dout}) fill_with_noise(t, seed++);
      cuda::Buffer memory(0, 1 << 16);
      const auto at = [&](int64_t seqlen, int64_t offset) {
        return Tensor(nullptr, DType::kI32, {c.batch, seqlen}).on(Device::kCuda, 0, static_cast<char*>(memory.get()) + offset);
      };
      d.t.scores.document_q = at(c.seqlen_q, 0);
      d.t.scores.document_k = at(c.seqlen_k, 1 << 15);
      for (const int kind : {0, 1, 2, 3}) {  // one; runs; runs in falling order; any
        for (const auto& [t, seqlen] : {std::pair<Tensor, int64_t>{d.t.scores.document_q, c.seqlen_q}, {d.t.scores.document_k, c.seqlen_k}}) {
          std::vector<int32_t> ids;
          for (int64_t i = 0; i < c.batch * seqlen; ++i) {
            const auto place = static_cast<int32_t>(i % seqlen);
            const int32_t run = place / (300 + 64 * static_cast<int32_t>(i / seqlen));
            ids.push_back(kind == 0   ? 7
                          : kind == 1 ? run
                          : kind == 2 ? -run
                                      : static_cast<int32_t>(static_cast<uint32_t>(place) * 2654435761u >> 30));
          }
          check(fattn_cuda_copy(0, FATTN_COPY_TO_DEVICE, t.data(), ids.data(), 4 * ids.size(), nullptr));
        }
        SCOPED_TRACE(std::to_string(headdim) + (causal ? ", causal, " : ", ") + std::to_string(kind));
        compare_both_passes(c, d, other, gradients);
      }
    }
}

// Both passes under masks of pairs that hide whole blocks, at the ends of rows and between, with NaN in values that nobody sees; of more keys than
// one CTA makes words of.
TEST_F(CudaV3Gpu, MasksOfWholeBlocksAgreeWithV2OverManyTiles) {
  enum Kind { kTriangle, kBand, kPadding, kPrefix, kPatches, kEmptyRows, kAll, kKinds };
  const int64_t seqlen_q = 1990, seqlen_k = 4500, batch = 2, nheads = 4, nheads_k = 1;
  const auto shows = [](int kind, int64_t row, int64_t key) {
    switch (kind) {
      case kTriangle: return key <= row;
      case kBand: return key > 2 * row - 300 && key < 2 * row + 260;
      case kPadding: return key >= 700 && key < 4200;
      case kPrefix: return key < 130 || (key >= row && key < row + 64);
      case kPatches: return (row / 300 + key / 190) % 3 == 0;
      case kEmptyRows: return row >= 500 && row / 128 % 3 != 1 && key % 1500 > 600;
      default: return true;
    }
  };
  for (int kind = 0; kind < kKinds; ++kind) {
    const int64_t heads = kind == kBand ? nheads : 1, masks = kind == kPatches ? batch : 1, rows = kind == kPadding ? 1 : seqlen_q;
    std::vector<uint8_t> mask;
    for (int64_t n = 0; n < masks * heads; ++n)
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t key = 0; key < seqlen_k; ++key) mask.push_back(static_cast<uint8_t>(shows(kind, row + 17 * n, key) ? 1 + key % 255 : 0));
    cuda::Buffer memory(0, mask.size());
    check(fattn_cuda_copy(0, FATTN_COPY_TO_DEVICE, memory.get(), mask.data(), mask.size(), nullptr));
    for (const int64_t headdim : {64, 96, 128, 192, 256})
      for (const bool causal : {false, true}) {
        const Case c = shape(headdim == 96 ? DType::kF16 : DType::kBF16, batch, seqlen_q, seqlen_k, nheads, nheads_k, headdim, causal);
        DeviceForward d(c), other(c), gradients(c);
        const Tensor dout = gradients.t.o;
        uint32_t seed = 1;
        for (const Tensor& t : {d.t.q, d.t.k, d.t.v, dout}) fill_with_noise(t, seed++);
        d.t.scores.mask = Tensor(nullptr, DType::kU8, {masks, heads, rows, seqlen_k}).on(Device::kCuda, 0, memory.get());
        if (kind == kPadding) {
          const std::vector<uint16_t> nan(static_cast<size_t>(300 * nheads_k * headdim), 0x7fff);
          check(fattn_cuda_copy(0, FATTN_COPY_TO_DEVICE, static_cast<uint16_t*>(d.t.v.data()) + 4200 * nheads_k * headdim, nan.data(), 2 * nan.size(),
                                nullptr));
        }
        SCOPED_TRACE(std::to_string(headdim) + (causal ? ", causal, " : ", ") + std::to_string(kind));
        compare_both_passes(c, d, other, gradients);
        if (causal || headdim > 128 || kind == kPadding) continue;  // kPadding has NaN where only its mask hides
        SCOPED_TRACE("beside a bias, and lengths");
        cuda::Buffer beside(0, static_cast<size_t>(seqlen_k) * 2);
        d.t.scores.bias = Tensor(nullptr, c.dtype, {1, 1, 1, seqlen_k}).on(Device::kCuda, 0, beside.get());
        fill_with_noise(d.t.scores.bias, seed++);
        compare_both_passes(c, d, other, gradients);
        d.t.scores.bias = Tensor();
        const int32_t used[] = {3000, 4400};
        check(fattn_cuda_copy(0, FATTN_COPY_TO_DEVICE, beside.get(), used, sizeof used, nullptr));
        d.t.scores.seqused_k = Tensor(nullptr, DType::kI32, {batch}).on(Device::kCuda, 0, beside.get());
        compare_forward(c, d, other);
      }
  }
}

// Both passes over packed sequences that use some of their keys, with NaN in those that they do not: none, one, up to the edges of blocks, all. Their
// keys lie in the order of their queries, or the other way round.
TEST_F(CudaV3Gpu, LengthsOfPackedSequencesAgreeWithV2OverManyTiles) {
  for (const int64_t headdim : {64, 96, 128, 256})
    for (const int kind : {0, 1, 2, 3}) {  // full, causal, window, and full with keys the other way round
      const std::vector<int32_t> of_q{700, 0, 333, 1, 64, 1000, 129, 500}, of_k{900, 40, 333, 500, 0, 1200, 192, 700},
          used{450, 0, 333, 1, 0, 1152, 191, 64};
      std::vector<int32_t> first_q{0}, first_k{0};
      for (size_t n = 0; n < used.size(); ++n) first_q.push_back(first_q.back() + of_q[n]), first_k.push_back(first_k.back() + of_k[n]);
      const int64_t total_q = first_q.back() + 5, total_k = first_k.back() + 9;
      std::vector<int32_t> given_k = first_k;
      for (size_t n = 0; n < used.size() && kind == 3; ++n) given_k[n] = first_k.back() - first_k[n + 1];
      Case c = shape(DType::kBF16, 1, total_q, total_k, 8, 2, headdim, kind == 1);
      if (kind == 2) c.window_left = 200, c.window_right = 70;
      DeviceForward d(c), other(c), gradients(c);
      for (DeviceForward* of : {&d, &other, &gradients}) of->pack();
      const Tensor dout = gradients.t.o;
      uint32_t seed = 1;
      for (const Tensor& t : {d.t.q, d.t.k, d.t.v, dout}) fill_with_noise(t, seed++);
      for (size_t n = 0; n < used.size(); ++n)
        for (const Tensor& t : {d.t.k, d.t.v}) {
          const auto row_bytes = static_cast<size_t>(2 * 2 * headdim);
          char* const hidden = static_cast<char*>(t.data()) + static_cast<size_t>(given_k[n] + used[n]) * row_bytes;
          check(fattn_cuda_memset(0, hidden, 0xff, static_cast<size_t>(of_k[n] - used[n]) * row_bytes, nullptr));
        }
      test::DeviceLists lists(1024);
      d.t.scores.cu_seqlens_q = lists.put(first_q, 0);
      d.t.scores.cu_seqlens_k = lists.put(given_k, 256);
      d.t.scores.seqused_k = lists.put(used, 512);
      ForwardTensors v2 = d.t;
      v2.o = other.t.o, v2.lse = other.t.lse;
      BackwardTensors by_v3{v2.q, v2.k, v2.v, v2.o, v2.lse, dout, gradients.t.q, gradients.t.k, gradients.t.v, v2.scores}, by_v2 = by_v3;
      by_v2.dq = other.t.q, by_v2.dk = other.t.k, by_v2.dv = other.t.v;
      for (const Tensor& t : {d.t.o, v2.o, by_v3.dq, by_v3.dk, by_v3.dv, by_v2.dq, by_v2.dk, by_v2.dv})
        check(fattn_cuda_memset(0, t.data(), 0xff, 2 * static_cast<size_t>(t.size()), nullptr));
      Options options = on_cuda(c);
      options.max_seqlen_q = 1000, options.max_seqlen_k = 1200;
      options.algorithm = Algorithm::kV3;
      ASSERT_TRUE(taken(describe(d.t, options)));
      for (int run = 0; run < 3; ++run) forward(d.t, options);
      options.algorithm = Algorithm::kV2;
      forward(v2, options);
      backward(by_v2, options);
      EXPECT_LT(difference(d.t.o, v2.o), apart(c.dtype, kOfO)) << headdim << " " << kind;
      EXPECT_LT(difference(d.t.lse, v2.lse), kPromisedInF32) << headdim << " " << kind;
      options.algorithm = Algorithm::kV3;
      for (const bool deterministic : {false, true}) {
        options.deterministic = deterministic;
        for (int run = 0; run < 3; ++run) backward(by_v3, options);
        EXPECT_LT(difference(by_v3.dq, by_v2.dq), apart(c.dtype, kOfGradients)) << headdim << " " << kind << " " << deterministic;
        EXPECT_LT(difference(by_v3.dk, by_v2.dk), apart(c.dtype, kOfGradients)) << headdim << " " << kind << " " << deterministic;
        EXPECT_LT(difference(by_v3.dv, by_v2.dv), apart(c.dtype, kOfGradients)) << headdim << " " << kind << " " << deterministic;
      }
    }
}

// Both passes, documents of packed sequences: runs and ids of any order, in sequences of several parts of the kernel that looks through the ids.
TEST_F(CudaV3Gpu, DocumentsOfPackedSequencesAgreeWithV2OverManyTiles) {
  for (const int64_t headdim : {64, 128, 256})
    for (const int kind : {0, 1, 2}) {  // full, causal, window
      const std::vector<int32_t> of_q{700, 0, 2300, 1, 64, 1025, 129}, of_k{900, 40, 2300, 500, 0, 1200, 192};
      std::vector<int32_t> first_q{0}, first_k{0};
      for (size_t n = 0; n < of_q.size(); ++n) first_q.push_back(first_q.back() + of_q[n]), first_k.push_back(first_k.back() + of_k[n]);
      const int64_t total_q = first_q.back() + 5, total_k = first_k.back() + 9;
      Case c = shape(DType::kBF16, 1, total_q, total_k, 8, 2, headdim, kind == 1);
      if (kind == 2) c.window_left = 200, c.window_right = 70;
      DeviceForward d(c), other(c), gradients(c);
      for (DeviceForward* of : {&d, &other, &gradients}) of->pack();
      const Tensor dout = gradients.t.o;
      uint32_t seed = 1;
      for (const Tensor& t : {d.t.q, d.t.k, d.t.v, dout}) fill_with_noise(t, seed++);
      test::DeviceLists lists(1 << 16);
      d.t.scores.cu_seqlens_q = lists.put(first_q, 0);
      d.t.scores.cu_seqlens_k = lists.put(first_k, 256);
      for (const bool sorted : {true, false}) {
        const auto ids_of = [&](const std::vector<int32_t>& first, int64_t total) {
          std::vector<int32_t> ids;
          for (size_t n = 0; n + 1 < first.size(); ++n)
            for (int32_t i = 0; i < first[n + 1] - first[n]; ++i)
              ids.push_back(sorted ? i / (300 + 64 * static_cast<int32_t>(n)) : static_cast<int32_t>(static_cast<uint32_t>(i) * 2654435761u >> 30));
          ids.resize(static_cast<size_t>(total), 1);
          return ids;
        };
        d.t.scores.document_q = lists.put(ids_of(first_q, total_q), 1024);
        d.t.scores.document_k = lists.put(ids_of(first_k, total_k), 1 << 15);
        ForwardTensors v2 = d.t;
        v2.o = other.t.o, v2.lse = other.t.lse;
        for (const Tensor& t : {d.t.o, v2.o}) check(fattn_cuda_memset(0, t.data(), 0xff, 2 * static_cast<size_t>(t.size()), nullptr));
        Options options = on_cuda(c);
        options.max_seqlen_q = options.max_seqlen_k = 2300;
        options.algorithm = Algorithm::kV3;
        ASSERT_TRUE(taken(describe(d.t, options)));
        for (int run = 0; run < 3; ++run) forward(d.t, options);
        options.algorithm = Algorithm::kV2;
        forward(v2, options);
        EXPECT_LT(difference(d.t.o, v2.o), apart(c.dtype, kOfO)) << headdim << " " << kind << " " << sorted;
        EXPECT_LT(difference(d.t.lse, v2.lse), kPromisedInF32) << headdim << " " << kind << " " << sorted;
        BackwardTensors by_v3{v2.q, v2.k, v2.v, v2.o, v2.lse, dout, gradients.t.q, gradients.t.k, gradients.t.v, v2.scores}, by_v2 = by_v3;
        by_v2.dq = other.t.q, by_v2.dk = other.t.k, by_v2.dv = other.t.v;
        for (const Tensor& t : {by_v3.dq, by_v3.dk, by_v3.dv, by_v2.dq, by_v2.dk, by_v2.dv})
          check(fattn_cuda_memset(0, t.data(), 0xff, 2 * static_cast<size_t>(t.size()), nullptr));
        backward(by_v2, options);
        options.algorithm = Algorithm::kV3;
        ASSERT_TRUE(taken(describe(by_v3, options)));
        for (int run = 0; run < 3; ++run) backward(by_v3, options);
        EXPECT_LT(difference(by_v3.dq, by_v2.dq), apart(c.dtype, kOfGradients)) << headdim << " " << kind << " " << sorted;
        EXPECT_LT(difference(by_v3.dk, by_v2.dk), apart(c.dtype, kOfGradients)) << headdim << " " << kind << " " << sorted;
        EXPECT_LT(difference(by_v3.dv, by_v2.dv), apart(c.dtype, kOfGradients)) << headdim << " " << kind << " " << sorted;
      }
    }
}

// ALiBi without a causal mask: tiles begin at the diagonal, wherever it is (before the first key, too), and meet the keys behind it last. Slopes of
// both signs: with one below 0 weights rise away from the diagonal, and out of their window.
TEST_F(CudaV3Gpu, AlibiFromTheDiagonalAgreesWithV2) {
  for (const int64_t headdim : {64, 128, 192, 256})
    for (const auto& [seqlen_q, seqlen_k] : {std::pair{1030, 1300}, {1300, 1030}, {2000, 700}, {300, 3001}, {1024, 1024}})
      for (const bool lengths : {false, true}) {
        const Case c = shape(headdim == 128 ? DType::kF16 : DType::kBF16, 3, seqlen_q, seqlen_k, 8, 2, headdim, false);
        DeviceForward d(c), other(c);
        uint32_t seed = 1;
        for (const Tensor& t : {d.t.q, d.t.k, d.t.v}) fill_with_noise(t, seed++);
        cuda::Buffer memory(0, 1024);
        const std::array<float, 8> slopes{0.5f, 0.0f, -0.01f, 0.004f, 2.0f, -1.5f, 0.0625f, 4.0f};
        const std::array<int32_t, 3> keys{static_cast<int32_t>(seqlen_k), 129, 0};
        memory.copy_from(slopes.data(), sizeof slopes);
        memory.copy_from(keys.data(), sizeof keys, nullptr, 512);
        const auto at = [&](DType dtype, int64_t count, int64_t offset) {
          return Tensor(nullptr, dtype, {count}).on(Device::kCuda, 0, static_cast<char*>(memory.get()) + offset);
        };
        d.t.scores.alibi_slopes = at(DType::kF32, 8, 0);
        if (lengths) d.t.scores.seqused_k = at(DType::kI32, 3, 512);
        ForwardTensors v2 = d.t;
        v2.o = other.t.o, v2.lse = other.t.lse;
        for (const double scale : {1 / std::sqrt(static_cast<double>(headdim)), 1.0}) {
          Options options = on_cuda(c);
          options.softmax_scale = scale;
          options.algorithm = Algorithm::kV3;
          ASSERT_TRUE(taken(describe(d.t, options)));
          forward(d.t, options);
          options.algorithm = Algorithm::kV2;
          forward(v2, options);
          EXPECT_LT(difference(d.t.o, v2.o), apart(c.dtype, kOfGradients))
              << headdim << " " << seqlen_q << " " << seqlen_k << " " << lengths << " " << scale;
          EXPECT_LT(difference(d.t.lse, v2.lse), kPromisedInF32) << headdim << " " << seqlen_q << " " << seqlen_k << " " << lengths << " " << scale;
        }
      }
}

// A problem with outputs of two algorithms: q, k, v, o and lse of forward, dout, and gradients in the places of q, k and v.
struct TwoWays {
  Case c;
  Options options;
  DeviceForward v3, v2, more, v3_gradients, v2_gradients;

  explicit TwoWays(const Case& of, uint32_t seed = 1) : c(of), options(on_cuda(of)), v3(of), v2(of), more(of), v3_gradients(of), v2_gradients(of) {
    for (const Tensor& t : {v3.t.q, v3.t.k, v3.t.v, more.t.o}) fill_with_noise(t, seed++);
    v2.t.q = v3.t.q, v2.t.k = v3.t.k, v2.t.v = v3.t.v;
    options.algorithm = Algorithm::kV3;
  }
  // Both passes; for ASSERT_TRUE.
  ::testing::AssertionResult v3_takes_it() const {
    const ::testing::AssertionResult forward_is = taken(describe(v3.t, options));
    return forward_is ? taken(describe(backward_of(v3_gradients), options)) : forward_is;
  }

  // Both take o and lse of v2.
  BackwardTensors backward_of(const DeviceForward& to) const { return {v2.t.q, v2.t.k, v2.t.v, v2.t.o, v2.t.lse, more.t.o, to.t.q, to.t.k, to.t.v}; }
  void compute(Algorithm algorithm) {
    options.algorithm = algorithm;
    const bool is_v3 = algorithm == Algorithm::kV3;
    const DeviceForward& gradients = is_v3 ? v3_gradients : v2_gradients;
    for (const Tensor& t : {gradients.t.q, gradients.t.k, gradients.t.v, is_v3 ? v3.t.o : v2.t.o})
      check(fattn_cuda_memset(0, t.data(), 0xff, 2 * static_cast<size_t>(t.size()), nullptr));  // NaN
    forward(is_v3 ? v3.t : v2.t, options);
    backward(backward_of(gradients), options);
  }
  double worst() const {
    return worst_difference(
        {{v3.t.o, v2.t.o}, {v3_gradients.t.q, v2_gradients.t.q}, {v3_gradients.t.k, v2_gradients.t.k}, {v3_gradients.t.v, v2_gradients.t.v}});
  }
};

// The gradients of many tiles, where rings of stages go round and several query heads share a key head; dq is summed in any order.
TEST_F(CudaV3Gpu, BackwardAgreesWithV2OverManyTiles) {
  for (const auto& [headdim, headdim_v] : {std::pair{64, 64}, {96, 96}, {128, 128}, {192, 128}, {192, 192}, {256, 256}, {64, 128}})
    for (const bool causal : {false, true})
      for (const auto& [seqlen_q, seqlen_k] : {std::pair{1030, 1300}, {1300, 1030}, {1024, 1024}}) {
        Case c = shape(headdim == 96 ? DType::kF16 : DType::kBF16, 2, seqlen_q, seqlen_k, 12, 4, headdim, causal);
        c.headdim_v = headdim_v;
        TwoWays both(c);
        ASSERT_TRUE(both.v3_takes_it());
        both.compute(Algorithm::kV2);
        for (const bool deterministic : {false, true}) {
          both.options.deterministic = deterministic;
          both.compute(Algorithm::kV3);
          EXPECT_LT(both.worst(), apart(c.dtype, kOfO))
              << headdim << "/" << headdim_v << (causal ? " causal " : " ") << seqlen_q << (deterministic ? " deterministic" : "");
        }
      }
}

TEST_F(CudaV3Gpu, BackwardWindowsAgreeWithV2OverManyTiles) {
  for (const int64_t headdim : {64, 96, 128, 256})
    for (const auto& [left, right] : {std::pair{0, 0}, {63, 0}, {64, 70}, {300, 0}, {640, 5}, {-1, 40}})
      for (const int64_t nheads : {4, 12}) {
        Case c = shape(headdim == 96 ? DType::kF16 : DType::kBF16, 2, 1030, 1300, nheads, 4, headdim, false);
        c.window_left = left;
        c.window_right = right;
        TwoWays both(c);
        ASSERT_TRUE(both.v3_takes_it());
        both.compute(Algorithm::kV2);
        for (const bool deterministic : {false, true}) {
          both.options.deterministic = deterministic;
          both.compute(Algorithm::kV3);
          EXPECT_LT(both.worst(), apart(c.dtype, kOfO))
              << headdim << " " << left << " " << right << " " << nheads << (deterministic ? " deterministic" : "");
        }
      }
}

// Of so many heads that the accumulators of dq are a ring, and dq of most heads is converted while later ones are computed.
void compare_many_heads(int64_t headdim) {
  struct Shape {
    int64_t batch, seqlen_q, seqlen_k, nheads, nheads_k;
  };
  for (const int window : {0, 200})
    for (const bool causal : {false, true})
      for (const Shape& of : {Shape{13, 500, 610, 13, 13}, {3, 1030, 1300, 70, 35}, {3, 500, 1900, 30, 15}}) {
        Case c = shape(DType::kBF16, of.batch, of.seqlen_q, of.seqlen_k, of.nheads, of.nheads_k, headdim, causal);
        if (window > 0) c.window_left = window, c.window_right = causal ? 0 : 30;
        TwoWays both(c);
        ASSERT_TRUE(both.v3_takes_it());
        both.compute(Algorithm::kV2);
        for (int run = 0; run < 4; ++run) both.compute(Algorithm::kV3);
        EXPECT_LT(both.worst(), apart(c.dtype, kOfO)) << headdim << (causal ? " causal " : " ") << window << ", batch " << of.batch;
      }
}
TEST_F(CudaV3Gpu, BackwardOfManyHeadsAgreesWithV2At64) { compare_many_heads(64); }
TEST_F(CudaV3Gpu, BackwardOfManyHeadsAgreesWithV2At128) { compare_many_heads(128); }

// The same where the last key is NaN, which under a causal mask the last row alone sees: the others' dq must not be lost, whoever converted it.
TEST_F(CudaV3Gpu, HiddenNaNOfManyHeadsSpoilsNothing) {
  for (const int64_t headdim : {64, 128}) {
    const Case c = shape(DType::kBF16, 12, 700, 700, 16, 16, headdim, true);
    TwoWays both(c);
    ASSERT_TRUE(both.v3_takes_it());
    const int64_t row = c.nheads * headdim, last = (c.seqlen_q - 1) * row;
    for (int64_t batch = 0; batch < c.batch; ++batch)
      check(fattn_cuda_memset(0, static_cast<uint16_t*>(both.v3.t.k.data()) + batch * c.seqlen_k * row + last, 0xff, 2 * static_cast<size_t>(row),
                              nullptr));
    both.compute(Algorithm::kV2);
    both.compute(Algorithm::kV3);
    const int64_t size = both.v3_gradients.t.q.size();
    const std::vector<uint16_t> v3 = halves(both.v3_gradients.t.q, 0, size), v2 = halves(both.v2_gradients.t.q, 0, size);
    for (int64_t i = 0; i < size; ++i) {
      const float a = test::float_of_bf16(v3[static_cast<size_t>(i)]), b = test::float_of_bf16(v2[static_cast<size_t>(i)]);
      const bool sees = i / row % c.seqlen_q == c.seqlen_q - 1;
      ASSERT_TRUE(sees ? std::isnan(a) : std::abs(a - b) < apart(c.dtype, kOfO)) << headdim << ", element " << i << ": " << a << " and " << b;
    }
  }
}

TEST_F(CudaV3Gpu, TheSameBitsAThousandTimes) {
  for (const int64_t headdim : {64, 128, 256})
    for (const bool causal : {false, true}) {
      TwoWays both(shape(DType::kBF16, 1, 520, 1030, 8, 2, headdim, causal));
      ASSERT_TRUE(both.v3_takes_it());
      both.compute(Algorithm::kV2);
      both.options.deterministic = true;
      const std::array<Tensor, 4> outputs = {both.v3.t.o, both.v3_gradients.t.q, both.v3_gradients.t.k, both.v3_gradients.t.v};
      std::array<std::vector<uint16_t>, 4> first;
      for (int run = 0; run < 1000; ++run) {
        both.compute(Algorithm::kV3);
        for (size_t i = 0; i < outputs.size(); ++i) {
          std::vector<uint16_t> bits = halves(outputs[i], 0, outputs[i].size());
          if (run == 0)
            first[i] = std::move(bits);
          else
            ASSERT_EQ(bits == first[i], true) << headdim << (causal ? " causal" : "") << ", run " << run << ", output " << i;
        }
      }
    }
}

// A shape that no table would have, small more often than large; of few head dimensions, because each has kernels to be compiled.
Case random_shape(std::mt19937_64& random) {
  constexpr std::pair<int, int> kHeaddims[] = {{64, 64}, {80, 80}, {96, 96}, {128, 128}, {192, 128}, {192, 192}, {256, 256}};
  const auto upto = [&](int64_t most) { return 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(most)); };
  const auto length = [&] { return std::min<int64_t>(upto(int64_t{1} << upto(12)), 3000); };
  const auto [headdim, headdim_v] = kHeaddims[random() % std::size(kHeaddims)];
  const int64_t nheads_k = upto(4), group = upto(4);
  const DType dtype = headdim == 128 && random() % 2 ? DType::kF16 : DType::kBF16;
  Case c = shape(dtype, upto(3), length(), length(), nheads_k * group, nheads_k, headdim, random() % 2);
  c.headdim_v = headdim_v;
  return c;
}

// Problems one after the other for FATTN_SOAK_SECONDS (5): `one` computes a problem of these random numbers, each kernel some times, and says how far
// algorithm v3 is from v2. A kernel that hangs ends the program, whose last word is the problem. A problem may have ten kernels to be compiled first,
// which took more than 60 s where 16 processes compiled at once.
constexpr unsigned kHangsAfterSeconds = 300;
template <class One>
void soak(const char* what, One one) {
  const char* const wanted = std::getenv("FATTN_SOAK_SECONDS");
  const char* const from = std::getenv("FATTN_SOAK_SEED");
  const std::chrono::duration<double> length(wanted ? std::atof(wanted) : 5.0);
  const auto end = std::chrono::steady_clock::now() + length;
  std::mt19937_64 random(from ? std::strtoull(from, nullptr, 10) : 1);
  int count = 0;
  while (std::chrono::steady_clock::now() < end) {
    std::string name;
    const double worst = one(random, [&](const std::string& where) {
      name = where;
      std::fprintf(stderr, "\r%d %s, now %-110s", count, what, where.c_str());
      alarm(kHangsAfterSeconds);
    });
    alarm(0);
    ASSERT_LT(worst, apart(DType::kBF16, kOfGradients)) << name;
    ++count;
  }
  std::fprintf(stderr, "\n");
  ::testing::Test::RecordProperty(what, count);
  EXPECT_GT(count, 0);
}

TEST_F(CudaV3Gpu, RandomShapesAgreeWithV2) {
  soak("shapes", [](std::mt19937_64& random, const auto& begin) {
    TwoWays both(random_shape(random), static_cast<uint32_t>(random()));
    both.options.deterministic = random() % 4 == 0;
    const Case& c = both.c;
    begin(std::to_string(c.batch) + " x " + std::to_string(c.seqlen_q) + " x " + std::to_string(c.seqlen_k) + ", heads " + std::to_string(c.nheads) +
          "/" + std::to_string(c.nheads_k) + ", headdim " + std::to_string(c.headdim) + "/" + std::to_string(c.headdim_v) +
          (c.causal ? " causal" : "") + (c.dtype == DType::kF16 ? " fp16" : " bf16") + (both.options.deterministic ? " deterministic" : ""));
    EXPECT_TRUE(both.v3_takes_it());
    both.compute(Algorithm::kV2);
    for (int run = 0; run < 8; ++run) both.compute(Algorithm::kV3);
    cuda::synchronize(0);
    return both.worst();
  });
}

// Packed sequences, whose tiles CTAs take when they are free: few and many, of any lengths, some empty, with heads for several turns; now and then
// they use some of their keys.
TEST_F(CudaV3Gpu, RandomPackedSequencesAgreeWithV2) {
  soak("packed", [](std::mt19937_64& random, const auto& begin) {
    const auto upto = [&](int64_t most) { return 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(most)); };
    constexpr int64_t kHeaddims[] = {64, 96, 128, 192, 256};
    const int64_t headdim = kHeaddims[random() % std::size(kHeaddims)], nheads_k = upto(4), group = upto(4), sequences = upto(int64_t{1} << upto(6));
    const int kind = static_cast<int>(random() % 3);  // full, causal, window
    const bool lengths = random() % 4 == 0;
    std::vector<int32_t> first_q{0}, first_k{0}, used;
    int64_t most_q = 1, most_k = 1;
    for (int64_t n = 0; n < sequences; ++n) {
      const auto length = [&] { return static_cast<int32_t>(random() % 8 == 0 ? 0 : std::min<int64_t>(upto(int64_t{1} << upto(11)), 1500)); };
      const int32_t of_q = length(), of_k = random() % 2 ? of_q : length();
      first_q.push_back(first_q.back() + of_q), first_k.push_back(first_k.back() + of_k);
      used.push_back(static_cast<int32_t>(random() % static_cast<uint64_t>(of_k + 1)));
      most_q = std::max<int64_t>(most_q, of_q), most_k = std::max<int64_t>(most_k, of_k);
    }
    Case c = shape(DType::kBF16, 1, first_q.back() + 3, first_k.back() + 1, nheads_k * group, nheads_k, headdim, kind == 1);
    if (kind == 2) c.window_left = upto(300) - 1, c.window_right = upto(100) - 1;
    DeviceForward d(c), other(c), gradients(c);
    for (DeviceForward* of : {&d, &other, &gradients}) of->pack();
    const Tensor dout = gradients.t.o;
    for (const Tensor& t : {d.t.q, d.t.k, d.t.v, dout}) fill_with_noise(t, static_cast<uint32_t>(random()));
    test::DeviceLists lists(1024);
    d.t.scores.cu_seqlens_q = lists.put(first_q, 0);
    d.t.scores.cu_seqlens_k = lists.put(first_k, 320);
    if (lengths) d.t.scores.seqused_k = lists.put(used, 640);
    Options options = on_cuda(c);
    options.max_seqlen_q = most_q, options.max_seqlen_k = most_k;
    begin(std::to_string(sequences) + " sequences up to " + std::to_string(most_q) + " x " + std::to_string(most_k) + ", in all " +
          std::to_string(first_q.back()) + " x " + std::to_string(first_k.back()) + ", heads " + std::to_string(c.nheads) + "/" +
          std::to_string(nheads_k) + ", headdim " + std::to_string(headdim) +
          (kind == 1   ? " causal"
           : kind == 2 ? " window"
                       : "") +
          (lengths ? " lengths" : ""));
    ForwardTensors v2 = d.t;
    v2.o = other.t.o, v2.lse = other.t.lse;
    BackwardTensors by_v3{v2.q, v2.k, v2.v, v2.o, v2.lse, dout, gradients.t.q, gradients.t.k, gradients.t.v, v2.scores}, by_v2 = by_v3;
    by_v2.dq = other.t.q, by_v2.dk = other.t.k, by_v2.dv = other.t.v;
    for (const Tensor& t : {d.t.o, v2.o, by_v3.dq, by_v3.dk, by_v3.dv, by_v2.dq, by_v2.dk, by_v2.dv})
      check(fattn_cuda_memset(0, t.data(), 0xff, 2 * static_cast<size_t>(t.size()), nullptr));
    options.algorithm = Algorithm::kV2;
    forward(v2, options);
    backward(by_v2, options);
    options.algorithm = Algorithm::kV3;
    EXPECT_TRUE(taken(describe(d.t, options)));
    EXPECT_TRUE(taken(describe(by_v3, options)));
    for (int run = 0; run < 8; ++run) {
      forward(d.t, options);
      backward(by_v3, options);
    }
    cuda::synchronize(0);
    return worst_difference({{d.t.o, v2.o}, {by_v3.dq, by_v2.dq}, {by_v3.dk, by_v2.dk}, {by_v3.dv, by_v2.dv}});
  });
}

}  // namespace
}  // namespace fattn
