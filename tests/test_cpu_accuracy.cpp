// How accurate the CPU kernels are beside their peers, over several seeds: in 16 bits an emulation of FlashAttention-2's rounding (the true maximum
// of a row, weights rounded once, their sum not), in fp32 PyTorch's SDPA, by numbers measured beforehand.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "testing/numbers.h"
#include "testing/run.h"
#include "testing/targets.h"

namespace fattn::testing {
namespace {

double narrow(double x) { return static_cast<double>(static_cast<float>(x)); }

// One head's tensors, row-major.
struct Head {
  int64_t rows, keys, width;
  Dense q, k, v, dout, bias;  // bias: (rows, keys), or empty
  bool causal;
  double scale;

  int64_t seen(int64_t i) const { return causal ? i + keys - rows + 1 : keys; }
};

struct Results {
  Dense o, lse, dq, dk, dv;
};

// Attention in float64.
Results exact_attention(const Head& h) {
  const auto n = static_cast<size_t>(h.rows), m = static_cast<size_t>(h.keys), w = static_cast<size_t>(h.width);
  Results r{Dense(n * w), Dense(n), Dense(n * w), Dense(m * w), Dense(m * w)};
  Dense score(m);
  for (size_t i = 0; i < n; ++i) {
    const auto seen = static_cast<size_t>(h.seen(static_cast<int64_t>(i)));
    double most = -std::numeric_limits<double>::infinity(), total = 0, delta = 0;
    for (size_t j = 0; j < seen; ++j) {
      double s = 0;
      for (size_t d = 0; d < w; ++d) s += h.q[i * w + d] * h.k[j * w + d];
      score[j] = s * h.scale + (h.bias.empty() ? 0.0 : h.bias[i * m + j]);
      most = std::max(most, score[j]);
    }
    for (size_t j = 0; j < seen; ++j) total += std::exp(score[j] - most);
    r.lse[i] = most + std::log(total);
    for (size_t j = 0; j < seen; ++j) {
      const double p = score[j] = std::exp(score[j] - r.lse[i]);
      for (size_t d = 0; d < w; ++d) r.o[i * w + d] += p * h.v[j * w + d];
    }
    for (size_t d = 0; d < w; ++d) delta += r.o[i * w + d] * h.dout[i * w + d];
    for (size_t j = 0; j < seen; ++j) {
      double dp = -delta;
      for (size_t d = 0; d < w; ++d) dp += h.dout[i * w + d] * h.v[j * w + d];
      const double ds = score[j] * dp * h.scale;
      for (size_t d = 0; d < w; ++d) {
        r.dv[j * w + d] += score[j] * h.dout[i * w + d];
        r.dk[j * w + d] += ds * h.q[i * w + d];
        r.dq[i * w + d] += ds * h.k[j * w + d];
      }
    }
  }
  return r;
}

// As FlashAttention-2 rounds it: scores and the factors of exponents in fp32, weights, dS, o and gradients once to `dtype`. Sums are exact.
Results flash_attention(const Head& h, DType dtype) {
  const auto n = static_cast<size_t>(h.rows), m = static_cast<size_t>(h.keys), w = static_cast<size_t>(h.width);
  Results r{Dense(n * w), Dense(n), Dense(n * w), Dense(m * w), Dense(m * w)};
  constexpr float kLog2E = 1.44269504088896341f;
  // With a bias scores are whole.
  const auto left = h.bias.empty() ? static_cast<float>(h.scale) : 1.0f;
  const float to_log2 = left * kLog2E;
  std::vector<float> score(m);
  for (size_t i = 0; i < n; ++i) {
    const auto seen = static_cast<size_t>(h.seen(static_cast<int64_t>(i)));
    float most = -std::numeric_limits<float>::infinity();
    for (size_t j = 0; j < seen; ++j) {
      float s = 0;
      for (size_t d = 0; d < w; ++d) s += static_cast<float>(h.q[i * w + d]) * static_cast<float>(h.k[j * w + d]);
      score[j] = h.bias.empty() ? s : s * static_cast<float>(h.scale) + static_cast<float>(h.bias[i * m + j]);
      most = std::max(most, score[j]);
    }
    const float shift = most * to_log2;
    double total = 0, delta = 0;
    for (size_t j = 0; j < seen; ++j) {
      const double p = narrow(std::exp2(std::fma(score[j], to_log2, -shift))), rounded = round_to(dtype, p);
      total += p;
      for (size_t d = 0; d < w; ++d) r.o[i * w + d] += rounded * h.v[j * w + d];
    }
    for (size_t d = 0; d < w; ++d) {
      r.o[i * w + d] = round_to(dtype, r.o[i * w + d] / total);
      delta += r.o[i * w + d] * h.dout[i * w + d];
    }
    const float lse = most * left + static_cast<float>(std::log(total)), lse2 = lse * kLog2E;
    r.lse[i] = static_cast<double>(lse);
    for (size_t j = 0; j < seen; ++j) {
      const double p = narrow(std::exp2(std::fma(score[j], to_log2, -lse2))), rounded = round_to(dtype, p);
      double dp = -delta;
      for (size_t d = 0; d < w; ++d) dp += h.dout[i * w + d] * h.v[j * w + d];
      const double ds = round_to(dtype, p * dp);
      for (size_t d = 0; d < w; ++d) {
        r.dv[j * w + d] += rounded * h.dout[i * w + d];
        r.dk[j * w + d] += ds * h.q[i * w + d];
        r.dq[i * w + d] += ds * h.k[j * w + d];
      }
    }
  }
  for (double& x : r.dq) x = round_to(dtype, x * h.scale);
  for (double& x : r.dk) x = round_to(dtype, x * h.scale);
  for (double& x : r.dv) x = round_to(dtype, x);
  return r;
}

// Of all elements of a tensor, over all seeds.
struct Error {
  double squares = 0, most = 0, largest = 0;  // largest: of the exact values
  int64_t n = 0;
  void add(const Dense& got, const Dense& exact) {
    for (size_t i = 0; i < exact.size(); ++i) {
      const double e = std::fabs(got[i] - exact[i]);
      if (!(e <= most)) most = std::isnan(e) ? HUGE_VAL : e;  // a NaN stays
      squares += e * e;
      largest = std::max(largest, std::fabs(exact[i]));
    }
    n += static_cast<int64_t>(exact.size());
  }
  double rms() const { return std::sqrt(squares / static_cast<double>(n)); }
};
using Errors = std::map<std::string, Error>;

void add(Errors& errors, const Results& got, const Results& exact, bool backward) {
  errors["o"].add(got.o, exact.o);
  errors["lse"].add(got.lse, exact.lse);
  if (!backward) return;
  errors["dq"].add(got.dq, exact.dq);
  errors["dk"].add(got.dk, exact.dk);
  errors["dv"].add(got.dv, exact.dv);
}

struct Problem {
  DType dtype;
  int64_t rows, keys, headdim;
  bool causal = false, bias = false;
  double sigma = 1;

  std::string name() const {
    std::string s = std::string(name_of(dtype)) + ", " + std::to_string(rows) + " rows, headdim " + std::to_string(headdim);
    return s + (causal ? ", causal" : "") + (bias ? ", bias" : "") + ", sigma " + std::to_string(static_cast<int>(sigma));
  }
};

// What a head is in float64 and, of 16 bits, by the emulation: worked out once for all targets, of one dtype at a time, in whose order tests are.
const std::pair<Results, Results>& expected_of(const Problem& p, int seed, const Head& head) {
  static std::map<std::pair<std::string, int>, std::pair<Results, Results>> kept;
  static DType dtype = DType::kF32;
  if (dtype != p.dtype) kept.clear();
  dtype = p.dtype;
  const std::pair key(p.name() + ", " + std::to_string(p.keys) + " keys", seed);
  if (const auto found = kept.find(key); found != kept.end()) return found->second;
  return kept[key] = {exact_attention(head), p.dtype == DType::kF32 ? Results{} : flash_attention(head, p.dtype)};
}

// The errors of a target and, of 16 bits, of the emulation: q, k, v = sigma N(0, 1).
std::pair<Errors, Errors> errors_of(const Problem& p, const Target& target, int seeds = 8) {
  Errors ours, peers;
  Case c;
  c.dtype = p.dtype;
  c.seqlen_q = p.rows;
  c.seqlen_k = p.keys;
  c.headdim = c.headdim_v = p.headdim;
  c.causal = p.causal;
  c.backward = p.rows > 8;
  if (p.bias) c.bias = Pairs::kAll;
  for (int seed = 1; seed <= seeds; ++seed) {
    c.seed = static_cast<uint64_t>(seed);
    const CaseInputs in = make_inputs(c);
    Head head{p.rows, p.keys, p.headdim, {}, {}, {}, read(in.dout), p.bias ? read(in.scores.bias) : Dense(), p.causal, c.scale()};
    for (const auto& [from, to] : {std::pair(&in.q, &head.q), std::pair(&in.k, &head.k), std::pair(&in.v, &head.v)}) {
      Dense x = read(*from);
      for (double& y : x) y *= p.sigma;
      write(*from, x);
      *to = read(*from);
    }
    const Outputs out = run_passes(c, in, options_of(c, target));
    const auto& [exact, emulated] = expected_of(p, seed, head);
    add(ours, {out.o, out.lse, out.dq, out.dk, out.dv}, exact, c.backward);
    if (p.dtype != DType::kF32) add(peers, emulated, exact, c.backward);
  }
  return {ours, peers};
}

using Parameter = std::tuple<DType, Target>;
std::string parameter_name(const ::testing::TestParamInfo<Parameter>& p) {
  return std::string(fattn::name_of(std::get<0>(p.param))) + "_" + name_of(std::get<1>(p.param));
}

// FATTN_TEST_WHOLE=1: `make test-all`.
bool test_is_whole() {
  const char* whole = std::getenv("FATTN_TEST_WHOLE");
  return whole && std::string(whole) == "1";
}

class Accuracy : public ::testing::TestWithParam<Parameter> {
 protected:
  void SetUp() override {
    std::tie(dtype, target) = GetParam();
    const std::string why = why_unavailable(target, dtype);
    if (!why.empty()) GTEST_SKIP() << why;
  }

  // In 16 bits the error is at most `rms` and `most` times the emulation's.
  void expect_like_emulation(const Problem& p) {
    const auto [ours, peers] = errors_of(p, target);
    const double rms = 1.10, most = p.sigma == 1 ? 1.7 : 1.35;
    for (const auto& [name, e] : ours) {
      const Error& peer = peers.at(name);
      if (name == "lse") {
        const double few_ulps = 4 * ulp(DType::kF32, e.largest);
        EXPECT_TRUE(e.most <= few_ulps || (e.rms() <= 1.06 * peer.rms() && e.most <= 1.35 * peer.most))
            << p.name() << ": error of lse " << e.most << ", RMS " << e.rms() << ", FlashAttention-2's " << peer.most << ", RMS " << peer.rms();
        continue;
      }
      const double none = ulp(p.dtype, e.largest * 0x1p-8);  // what nobody sees beside the largest
      EXPECT_TRUE(e.rms() <= rms * peer.rms() + none / 256)
          << p.name() << ": RMS of " << name << "'s error " << e.rms() << ", FlashAttention-2's " << peer.rms();
      EXPECT_TRUE(e.most <= most * peer.most + none)
          << p.name() << ": largest error of " << name << " " << e.most << ", FlashAttention-2's " << peer.most;
    }
  }

  DType dtype = DType::kF32;
  Target target;
};

TEST_P(Accuracy, IsThatOfFlashAttention2) {
  if (dtype == DType::kF32) GTEST_SKIP() << "fp32 has another peer";
  if (target.backend != Backend::kCpu || target.algorithm == Algorithm::kStandard) GTEST_SKIP() << "is not the CPU's kernels";
  for (const double sigma : {1.0, 2.0, 3.0, 8.0, 64.0})
    for (const int64_t headdim : {64, 128}) {
      if (dtype == DType::kF16 && sigma == 64) continue;  // out of range
      if (headdim == 128 && (target.isa == Isa::kScalar || (sigma != 1 && sigma != 8)) && !test_is_whole())
        continue;  // the dear ones: of some scales, by the plain kernels none
      expect_like_emulation({dtype, 256, 256, headdim, false, false, sigma});
      expect_like_emulation({dtype, 256, 256, headdim, true, false, sigma});
      if (target.algorithm == Algorithm::kV2) expect_like_emulation({dtype, 192, 256, headdim, false, true, sigma});  // with a bias
      expect_like_emulation({dtype, 4, 1500, headdim, false, false, sigma});                                          // decode
    }
}

// What torch 2.15's scaled_dot_product_attention has in fp32 on a Zen 4 (flash backend; 12 seeds of 2 heads): RMS, and the mean of the largest
// errors.
struct Measured {
  const char* tensor;
  double rms, most;
};
constexpr Measured kTorchFull[] = {{"o", 2.00e-8, 3.17e-7}, {"dq", 2.51e-8, 3.80e-7}, {"dk", 2.43e-8, 4.03e-7}, {"dv", 2.27e-8, 3.39e-7}};
constexpr Measured kTorchCausal[] = {{"o", 3.42e-8, 6.70e-7}, {"dq", 4.14e-8, 7.45e-7}, {"dk", 4.39e-8, 1.32e-6}, {"dv", 4.49e-8, 1.78e-6}};

TEST_P(Accuracy, OfFp32IsThatOfTorch) {
  if (dtype != DType::kF32) GTEST_SKIP() << "has another peer";
  if (target.backend != Backend::kCpu || target.algorithm == Algorithm::kStandard) GTEST_SKIP() << "is not the CPU's kernels";
  for (const bool causal : {false, true}) {
    const Problem p{dtype, 1024, 1024, 64, causal, false, 1};
    const Errors ours = errors_of(p, target, 2).first;
    for (const Measured& m : causal ? kTorchCausal : kTorchFull) {
      const Error& e = ours.at(m.tensor);
      EXPECT_TRUE(e.rms() <= 1.25 * m.rms) << p.name() << ": RMS of " << m.tensor << "'s error " << e.rms() << ", torch's " << m.rms;
      EXPECT_TRUE(e.most <= 1.5 * m.most) << p.name() << ": largest error of " << m.tensor << " " << e.most << ", torch's " << m.most;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Every, Accuracy,
                         ::testing::Combine(::testing::Values(DType::kF32, DType::kF16, DType::kBF16), ::testing::ValuesIn(all_targets())),
                         parameter_name);

}  // namespace
}  // namespace fattn::testing
