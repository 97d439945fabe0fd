// Numbers that are known beforehand, the yardstick's own correctness, and the limits that the documents promise.
#include <gtest/gtest.h>

#include <cmath>
#include <tuple>

#include "testing/numbers.h"
#include "testing/run.h"
#include "testing/standard_model.h"
#include "testing/targets.h"

namespace fattn::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

using Parameter = std::tuple<DType, Target>;
std::string parameter_name(const ::testing::TestParamInfo<Parameter>& p) {
  return std::string(fattn::name_of(std::get<0>(p.param))) + "_" + name_of(std::get<1>(p.param));
}

class NumericsSmall : public ::testing::TestWithParam<Parameter> {
 protected:
  void SetUp() override {
    std::tie(dtype, target) = GetParam();
    const std::string why = why_unavailable(target, dtype);
    if (!why.empty()) GTEST_SKIP() << why;
  }
  Case square(int64_t seqlen_q, int64_t seqlen_k, int64_t nheads, int64_t headdim) const {
    Case c;
    c.dtype = dtype;
    c.seqlen_q = seqlen_q;
    c.seqlen_k = seqlen_k;
    c.nheads = c.nheads_k = nheads;
    c.headdim = c.headdim_v = headdim;
    return c;
  }
  Outputs run(const Case& c) const { return run_passes(c, make_inputs(c), options_of(c, target)); }

  DType dtype = DType::kF32;
  Target target;
};

TEST_P(NumericsSmall, OneKeyGivesItsValueExactly) {
  const Case c = square(70, 1, 2, 64);
  const CaseInputs in = make_inputs(c);
  const Outputs out = run(c);
  const Dense v = read(in.v);
  for (size_t i = 0; i < out.o.size(); ++i) {
    const double expected = v[i % v.size()];
    ASSERT_EQ(out.o[i], expected) << i;
  }
  for (double x : out.dq) ASSERT_LE(std::fabs(x), 0.1);  // 0 but for the rounding of delta
}

TEST_P(NumericsSmall, RowsThatSeeNothingAreZero) {
  Case c = square(40, 10, 2, 48);
  c.causal = true;
  const Outputs out = run(c);
  for (int64_t i = 0; i < 30; ++i)
    for (int64_t h = 0; h < 2; ++h) {
      ASSERT_EQ(out.lse[static_cast<size_t>(h * 40 + i)], -kInfinity);
      for (int64_t d = 0; d < 48; ++d) {
        const auto at = static_cast<size_t>((i * 2 + h) * 48 + d);
        ASSERT_EQ(out.o[at], 0.0);
        ASSERT_EQ(out.dq[at], 0.0);
      }
    }
}

// The first rows are aligned with places so far before the first key that their window does not reach it.
TEST_P(NumericsSmall, RowsBeforeAWindowAreZero) {
  Case c = square(40, 10, 2, 48);
  c.window_left = 4;
  c.window_right = 2;
  if (!is_to_compute(target, c)) GTEST_SKIP() << "has no windows";
  const Outputs out = run(c);
  for (int64_t i = 0; i < 40; ++i) ASSERT_EQ(out.lse[static_cast<size_t>(i)] == -kInfinity, i < 28) << i;
  for (size_t i = 0; i < 28 * 2 * 48; ++i) {
    ASSERT_EQ(out.o[i], 0.0);
    ASSERT_EQ(out.dq[i], 0.0);
  }
}

// Scores of 32 and -32 are cut down to the cap and its negative.
TEST_P(NumericsSmall, CappedScoresAreTheTanhOfScores) {
  Case c = square(20, 2, 1, 16);
  c.softcap = 0.75;
  c.softmax_scale = 1.0;
  c.backward = false;
  if (!is_to_compute(target, c)) GTEST_SKIP() << "has no softcap";
  const CaseInputs in = make_inputs(c);
  write(in.q, Dense(static_cast<size_t>(in.q.size()), 1.0));
  Dense k(static_cast<size_t>(in.k.size()), 2.0);
  std::fill(k.begin() + 16, k.end(), -2.0);
  write(in.k, k);
  const Outputs out = run_passes(c, in, options_of(c, target));
  for (double x : out.lse) ASSERT_NEAR(x, std::log(std::exp(0.75) + std::exp(-0.75)), dtype == DType::kBF16 ? 2e-4 : 4e-7);
}

TEST_P(NumericsSmall, NoKeysAtAll) {
  const Case c = square(9, 0, 2, 32);
  const Outputs out = run(c);
  for (double x : out.o) ASSERT_EQ(x, 0.0);
  for (double x : out.lse) ASSERT_EQ(x, -kInfinity);
  for (double x : out.dq) ASSERT_EQ(x, 0.0);
}

// Scores of any size: the maximum is taken off before exp, so nothing overflows and weights still sum to 1.
TEST_P(NumericsSmall, HugeLogitsStayFinite) {
  for (bool causal : {false, true}) {
    Case c = square(66, 131, 1, 64);
    c.inputs = Inputs::kHugeLogits;
    c.causal = causal;
    const Outputs out = run(c);
    for (const Dense* x : {&out.o, &out.lse, &out.dq, &out.dk, &out.dv})
      for (double value : *x) ASSERT_TRUE(std::isfinite(value));
    for (double x : out.o) ASSERT_LE(std::fabs(x), 6.0);  // a mean of values that lie within
  }
}

// A constant value has itself as every mean.
TEST_P(NumericsSmall, WeightsSumToOne) {
  const Case c = square(50, 300, 2, 64);
  const CaseInputs in = make_inputs(c);
  write(in.v, Dense(static_cast<size_t>(in.v.size()), 1.0));
  const Outputs out = run_passes(c, in, options_of(c, target));
  // Weights rounded to the dtype sum to 1 within half a unit each, relatively; the sum itself is fp32.
  const double allowed = 2 * ulp(dtype, 1.0) + 300 * ulp(DType::kF32, 1.0);
  for (double x : out.o) ASSERT_LE(std::fabs(x - 1.0), allowed);
}

const auto kDTypes = ::testing::Values(DType::kF32, DType::kF16, DType::kBF16);
INSTANTIATE_TEST_SUITE_P(Every, NumericsSmall, ::testing::Combine(kDTypes, ::testing::ValuesIn(all_targets())), parameter_name);

// N(0, 1), not causal, seqlen >= 256: the largest difference to standard attention in the same dtype.
class DocumentedLimits : public NumericsSmall {};

TEST_P(DocumentedLimits, DifferenceToStandardAttention) {
  const double limit = dtype == DType::kF32 ? 1e-5 : dtype == DType::kF16 ? 1e-3 : 8e-3;
  for (const auto& [seqlen, headdim] : {std::pair{256, 64}, std::pair{512, 128}, std::pair{1024, 64}}) {
    Case c = square(seqlen, seqlen, 1, headdim);
    c.backward = false;
    const CaseInputs in = make_inputs(c);
    const Dense o = run_passes(c, in, options_of(c, target)).o;
    const auto largest_difference = [&](const Dense& standard) {
      double largest = 0;
      for (size_t i = 0; i < o.size(); ++i) {
        const double d = std::fabs(o[i] - standard[i]);
        if (!(d <= largest)) largest = std::isnan(d) ? HUGE_VAL : d;
      }
      return largest;
    };
    const ModelShape model{1, seqlen, seqlen, 1, 1, headdim, headdim, dtype, false, c.scale()};
    EXPECT_LT(largest_difference(standard_forward(model, read(in.q), read(in.k), read(in.v)).o), limit) << "to the model, seqlen " << seqlen;
    const Target standard{Backend::kCpu, Algorithm::kStandard, Isa::kAuto, 0};
    if (why_unavailable(standard, dtype).empty()) {
      EXPECT_LT(largest_difference(run_passes(c, in, options_of(c, standard)).o), limit) << "to algorithm standard, seqlen " << seqlen;
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Every, DocumentedLimits, ::testing::Combine(kDTypes, ::testing::ValuesIn(all_targets())), parameter_name);

// ---- The yardstick -------------------------------------------------------------------------------------------------------

Case of_model(DType dtype, bool causal) {
  Case c;
  c.dtype = dtype;
  c.batch = 2;
  c.seqlen_q = 37;
  c.seqlen_k = 29;
  c.nheads = 4;
  c.nheads_k = 2;
  c.headdim = 24;
  c.headdim_v = 16;
  c.causal = causal;
  return c;
}
ModelShape model_of(const Case& c) {
  return {c.batch, c.seqlen_q, c.seqlen_k, c.nheads,      c.nheads_k,     c.headdim, c.headdim_v,
          c.dtype, c.causal,   c.scale(),  c.window_left, c.window_right, c.softcap};
}

// Without rounding it is exact attention: the same as the oracle, which is written in another way.
TEST(StandardModelSmall, InFloat64IsTheOracle) {
  std::vector<Case> cases{of_model(DType::kF64, false), of_model(DType::kF64, true), of_model(DType::kF64, false), of_model(DType::kF64, true)};
  cases[2].window_left = 6;
  cases[2].window_right = 3;
  cases[3].softcap = 2;
  for (const Case& c : cases) {
    const CaseInputs in = make_inputs(c);
    const Outputs oracle = run_passes(c, in, options_of(c, {Backend::kReference, Algorithm::kAuto, Isa::kAuto, 0}));
    const Dense q = read(in.q), k = read(in.k), v = read(in.v);
    const ModelForward f = standard_forward(model_of(c), q, k, v);
    const ModelBackward b = standard_backward(model_of(c), q, k, v, f.o, f.lse, read(in.dout));
    const auto near = [](const char* name, const Dense& x, const Dense& y) {
      ASSERT_EQ(x.size(), y.size());
      for (size_t i = 0; i < x.size(); ++i)
        if (x[i] != y[i]) {
          ASSERT_NEAR(x[i], y[i], 1e-13) << name << " " << i;
        }
    };
    near("o", f.o, oracle.o);
    near("lse", f.lse, oracle.lse);
    near("dq", b.dq, oracle.dq);
    near("dk", b.dk, oracle.dk);
    near("dv", b.dv, oracle.dv);
    // With FlashAttention-2's rounding, too: without a dtype to round to there is none.
    ModelShape fused = model_of(c);
    fused.fused = true;
    const ModelForward ff = standard_forward(fused, q, k, v);
    const ModelBackward fb = standard_backward(fused, q, k, v, f.o, f.lse, read(in.dout));
    near("fused o", ff.o, oracle.o);
    near("fused lse", ff.lse, oracle.lse);
    near("fused dq", fb.dq, oracle.dq);
    near("fused dk", fb.dk, oracle.dk);
    near("fused dv", fb.dv, oracle.dv);
  }
}

// In a dtype it gives numbers of that dtype, and its error is a few units of it: neither more nor nothing.
TEST(StandardModelSmall, RoundsToTheDtype) {
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const Case c = of_model(dtype, true);
    const CaseInputs in = make_inputs(c);
    const Dense q = read(in.q), k = read(in.k), v = read(in.v);
    const ModelForward f = standard_forward(model_of(c), q, k, v);
    const ModelBackward b = standard_backward(model_of(c), q, k, v, f.o, f.lse, read(in.dout));
    for (const Dense* x : {&f.o, &b.dq, &b.dk, &b.dv})
      for (double value : *x) ASSERT_EQ(value, round_to(dtype, value)) << fattn::name_of(dtype);
    ModelShape exact = model_of(c);
    exact.dtype = DType::kF64;
    const ModelForward truth = standard_forward(exact, q, k, v);
    double error = 0;
    for (size_t i = 0; i < f.o.size(); ++i) error = std::max(error, std::fabs(f.o[i] - truth.o[i]));
    EXPECT_GT(error, 0.1 * ulp(dtype, 1.0)) << fattn::name_of(dtype);
    EXPECT_LT(error, 10 * ulp(dtype, 1.0)) << fattn::name_of(dtype);
  }
}

}  // namespace
}  // namespace fattn::testing
