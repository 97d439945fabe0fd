// batch_invariant: a row of o and lse has the same bits in any company, and however the queries of its sequence are divided among calls.
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "fattn/attention.hpp"
#include "testing/run.h"
#include "testing/targets.h"

namespace fattn::testing {
namespace {

constexpr int64_t kBatch = 3, kSeqlen = 230, kHeads = 4;

using Parameter = std::tuple<DType, Target>;
std::string parameter_name(const ::testing::TestParamInfo<Parameter>& p) {
  return std::string(fattn::name_of(std::get<0>(p.param))) + "_" + name_of(std::get<1>(p.param));
}
std::vector<Target> targets() {
  std::vector<Target> some;
  for (const Target& t : all_targets())
    if (t.backend == Backend::kReference || (t.algorithm != Algorithm::kStandard && t.algorithm != Algorithm::kV1)) some.push_back(t);
  return some;
}

class BatchInvariantSmall : public ::testing::TestWithParam<Parameter> {
 protected:
  void SetUp() override {
    std::tie(dtype, target) = GetParam();
    if (const std::string why = why_unavailable(target, dtype); !why.empty()) GTEST_SKIP() << why;
    target.batch_invariant = true;
  }
  DType dtype = DType::kF32;
  Target target;
};

Case of(DType dtype, int64_t headdim) {
  Case c;
  c.dtype = dtype;
  c.batch = kBatch;
  c.seqlen_q = c.seqlen_k = kSeqlen;
  c.nheads = kHeads;
  c.nheads_k = 2;
  c.headdim = c.headdim_v = headdim;
  c.causal = true;
  c.backward = false;
  c.seed = 5;
  return c;
}

// What a score may depend on where a row's own part of it is the same in every call.
std::vector<Case> cases(DType dtype) {
  std::vector<Case> all{of(dtype, 64), of(dtype, 40)};
  Case c = of(dtype, 64);
  c.window_left = 50;
  all.push_back(c);
  c.causal = false;
  c.window_right = 0;
  c.softcap = 3;
  all.push_back(c);
  c = of(dtype, 128);
  c.alibi = Alibi::kHeads;
  c.sinks = true;
  all.push_back(c);
  c = of(dtype, 64);
  c.inputs = Inputs::kHugeLogits;
  all.push_back(c);
  return all;
}

// Rows [begin, end) of batch entry n.
Tensor rows(const Tensor& t, int64_t n, int64_t begin, int64_t end) {
  auto* const data = static_cast<unsigned char*>(t.data()) + static_cast<size_t>(n * t.stride(0) + begin * t.stride(1)) * size_of(t.dtype());
  return Tensor(data, t.dtype(), {1, end - begin, t.shape(2), t.shape(3)}, {t.stride(0), t.stride(1), t.stride(2), t.stride(3)});
}
Tensor lse_rows(const Tensor& t, int64_t n, int64_t begin, int64_t end) {
  auto* const data = static_cast<float*>(t.data()) + n * t.stride(0) + begin * t.stride(2);
  return Tensor(data, t.dtype(), {1, t.shape(1), end - begin}, {t.stride(0), t.stride(1), t.stride(2)});
}

struct Call {
  Tensor q, k, v;
};
CaseForward run(const Call& call, const ScoreTensors& scores, const Case& c, const Target& target) {
  Case of_call = c;
  of_call.batch = call.q.shape(0);
  of_call.seqlen_q = call.q.shape(1);
  CaseForward out = make_forward(of_call);
  ForwardTensors t;
  t.q = call.q;
  t.k = call.k;
  t.v = call.v;
  t.o = out.o;
  t.lse = out.lse;
  t.scores = scores;
  forward(t, options_of(c, target));
  return out;
}

// Queries [begin, end) of entry n with the keys up to the last of them.
void expect_same(const CaseForward& whole, const CaseForward& part, int64_t n, int64_t begin, int64_t end, const std::string& what) {
  EXPECT_TRUE(same_bits(read(rows(whole.o, n, begin, end)), read(part.o))) << "o of " << what << ", entry " << n << ", rows from " << begin;
  EXPECT_TRUE(same_bits(read(lse_rows(whole.lse, n, begin, end)), read(part.lse))) << "lse of " << what << ", entry " << n << ", rows from " << begin;
}

TEST_P(BatchInvariantSmall, RowsAloneInChunksAndTogether) {
  for (const Case& c : cases(dtype)) {
    const CaseInputs in = make_inputs(c);
    const CaseForward whole = run({in.q, in.k, in.v}, in.scores, c, target);
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 1}, {0, 5}, {63, 64}, {64, 65}, {70, 200}, {229, 230}, {100, 230}})
      for (const int64_t n : {int64_t{0}, kBatch - 1}) {
        const CaseForward part = run({rows(in.q, n, begin, end), rows(in.k, n, 0, end), rows(in.v, n, 0, end)}, in.scores, c, target);
        expect_same(whole, part, n, begin, end, name_of(c));
      }
  }
}

// The same with other lengths beside: seqused_k, and threads.
TEST_P(BatchInvariantSmall, EntriesOfOtherLengths) {
  Case c = of(dtype, 64);
  c.key_lengths = true;
  c.seqlen_q = 3;
  const CaseInputs in = make_inputs(c);
  target.num_threads = 2;
  const CaseForward whole = run({in.q, in.k, in.v}, in.scores, c, target);
  const Dense lengths = read(in.scores.seqused_k);
  for (int64_t n = 0; n < kBatch; ++n) {
    const auto keys = static_cast<int64_t>(lengths[static_cast<size_t>(n)]);
    const CaseForward part = run({rows(in.q, n, 0, 3), rows(in.k, n, 0, keys), rows(in.v, n, 0, keys)}, {}, c, target);
    expect_same(whole, part, n, 0, 3, "lengths");
  }
}

// And it stays within the bounds of the oracle.
TEST_P(BatchInvariantSmall, IsRight) {
  for (const Case& c : cases(dtype)) {
    const CaseResult result = run_case(c, target);
    EXPECT_TRUE(result.passed()) << name_of(c) << ": " << result.summary();
  }
}

INSTANTIATE_TEST_SUITE_P(All, BatchInvariantSmall,
                         ::testing::Combine(::testing::Values(DType::kF32, DType::kF16, DType::kBF16), ::testing::ValuesIn(targets())),
                         parameter_name);

// The other algorithms are refused, and a backward pass does not look at it.
TEST(BatchInvariantPlanSmall, WhoHasIt) {
  Case c = of(DType::kF32, 64);
  const CaseInputs in = make_inputs(c);
  const CaseForward out = make_forward(c);
  const CaseGradients grads = make_gradients(c);
  ForwardTensors t{in.q, in.k, in.v, out.o, out.lse, {}, {}};
  Options options;
  options.batch_invariant = true;
  EXPECT_TRUE(supported(describe(t, options)));
  for (const Algorithm algorithm : {Algorithm::kStandard, Algorithm::kV1}) {
    options.algorithm = algorithm;
    const Support support = supported(describe(t, options));
    EXPECT_FALSE(support);
    EXPECT_NE(support.reason.find("batch_invariant"), std::string::npos) << support.reason;
  }
  BackwardTensors b{in.q, in.k, in.v, out.o, out.lse, in.dout, grads.dq, grads.dk, grads.dv, {}, {}, {}, {}};
  options.algorithm = Algorithm::kV1;
  EXPECT_TRUE(supported(describe(b, options)));
}

}  // namespace
}  // namespace fattn::testing
