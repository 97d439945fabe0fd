// Runs the table of cases on everything that can compute it. `--gtest_filter=*Small*` is the part for sanitizer builds.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <tuple>

#include "prepared_cases.h"
#include "testing/check.h"
#include "testing/numbers.h"
#include "testing/targets.h"
#include "testing/tensors.h"

namespace fattn::testing {
namespace {

// body(i) for every i < n, on two threads: the oracle is single-threaded.
template <class Body>
void in_parallel(size_t n, const Body& body) {
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i = next++; i < n; i = next++) body(i);
  };
  std::thread other(work);
  work();
  other.join();
}

using Parameter = std::tuple<DType, Target>;
std::string parameter_name(const ::testing::TestParamInfo<Parameter>& info) {
  return std::string(fattn::name_of(std::get<0>(info.param))) + "_" + name_of(std::get<1>(info.param));
}

// Of how many cases of a dtype one is computed. FATTN_TEST_WHOLE=1 (`make test-all`): every case in every dtype. Without it, each of those that are
// not small, and of the small ones those that take six sevenths of their time, is computed in one of the three dtypes in turn; of dear ones, which
// take six sevenths of the time of large ones, a third of these. Slow kernels compute a third of that of large ones: the plain ones, and those on
// tiles, which most processors have in memory only. With 0 (sanitizers and emulation) a third of that is computed of small cases. `fattn check` has
// all.
size_t turns_of(const Case& c, const Target& target) {
  const char* given = std::getenv("FATTN_TEST_WHOLE");
  const std::string whole = given ? given : "";
  if (whole == "1") return 1;
  if (c.small()) return (c.flops() > 3e6 ? 3 : 1) * (whole == "0" ? 3 : 1);
  const bool slow = target.isa == Isa::kAmx || target.isa == Isa::kScalar;
  return (c.flops() <= 1e8 ? 3 : 9) * (slow ? 3 : 1);
}

class Table : public ::testing::TestWithParam<Parameter> {
 protected:
  void run(bool small) {
    const DType dtype = std::get<0>(GetParam());
    const Target target = std::get<1>(GetParam());
    const std::string why = why_unavailable(target, dtype);
    if (!why.empty()) GTEST_SKIP() << why;
    std::vector<Case> cases;
    const size_t turn = dtype == DType::kF32 ? 0 : dtype == DType::kF16 ? 1 : 2;
    size_t seen = 0;  // of this part and dtype
    for (const Case& c : all_cases()) {
      if (c.dtype != dtype || c.small() != small) continue;
      const size_t turns = turns_of(c, target);
      if (seen++ % turns == turn % turns && is_to_compute(target, c)) cases.push_back(c);
    }
    // Dear cases first, so that the two threads end together.
    std::stable_sort(cases.begin(), cases.end(), [](const Case& a, const Case& b) { return a.flops() > b.flops(); });
    std::vector<CaseResult> results(cases.size());
    in_parallel(cases.size(), [&](size_t i) {
      Target t = target;
      t.num_threads = static_cast<int>(cases[i].seed % 4);
      results[i] = Prepared::of(cases[i])->run(t);
    });
    size_t failed = 0;
    for (size_t i = 0; i < cases.size(); ++i) {
      // A bound that is infinite, or NaN, would let anything pass. Only where there are no sequences at all it is 0: rows of none are exact.
      for (const TensorVerdict& v : results[i].tensors) {
        if (target.backend != Backend::kReference || cases[i].flops() > 2e6) continue;
        EXPECT_TRUE(std::isfinite(v.allowed) && (v.allowed > 0 || cases[i].batch == 0)) << cases[i].name << " " << v.tensor << " " << v.allowed;
      }
      if (results[i].passed()) continue;
      ADD_FAILURE() << cases[i].name << ": " << results[i].summary();
      ++failed;
    }
    if (failed) std::printf("%zu of %zu cases failed\n", failed, cases.size());
  }
};

class TableSmall : public Table {};
class TableLarge : public Table {};

TEST_P(TableSmall, Passes) { run(true); }
TEST_P(TableLarge, Passes) { run(false); }

const auto kDTypes = ::testing::Values(DType::kF32, DType::kF16, DType::kBF16);

INSTANTIATE_TEST_SUITE_P(Every, TableSmall, ::testing::Combine(kDTypes, ::testing::ValuesIn(all_targets())), parameter_name);

// The reference backend is what it would be compared with; the small cases say enough about its 16- and 32-bit ends.
std::vector<Target> fast_targets() {
  std::vector<Target> fast;
  for (const Target& t : all_targets())
    if (t.backend != Backend::kReference) fast.push_back(t);
  return fast;
}
INSTANTIATE_TEST_SUITE_P(Every, TableLarge, ::testing::Combine(kDTypes, ::testing::ValuesIn(fast_targets())), parameter_name);

// The turns above are those of the same case in every dtype only if the table has the same cases in every dtype, in the same order.
TEST(CasesSmall, AreTheSameInEveryDType) {
  std::map<DType, std::vector<std::string>> names;
  for (const Case& c : all_cases()) names[c.dtype].push_back(c.name.substr(c.name.find('-')));
  EXPECT_EQ(names[DType::kF16], names[DType::kF32]);
  EXPECT_EQ(names[DType::kBF16], names[DType::kF32]);
}

TEST(CasesSmall, AreAFewHundredWithUniqueNames) {
  std::set<std::string> names;
  for (const Case& c : all_cases()) EXPECT_TRUE(names.insert(c.name).second) << c.name;
  EXPECT_GE(names.size(), 300u);
}

// What a target is not to compute, it refuses, or it is a problem in disguise that it can compute: never another result.
TEST(CasesSmall, WhatIsNotComputedIsRefused) {
  size_t asked = 0, refused = 0;
  for (const Case& c : all_cases()) {
    if (c.flops() > 1e6) continue;
    std::optional<PreparedCase> prepared;
    for (const Target& target : all_targets()) {
      if (is_to_compute(target, c) || !why_unavailable(target, c.dtype).empty()) continue;
      if (!prepared) prepared.emplace(c);
      ++asked;
      const CaseResult result = prepared->run(target);
      if (!result.skipped.empty()) ++refused;
      EXPECT_TRUE(result.passed() || result.skipped.find("does not compute") != std::string::npos) << c.name << ": " << result.summary();
    }
  }
  EXPECT_TRUE(refused > 0 || asked == 0) << "of " << asked;  // none is asked where there is no OpenBLAS
}

TEST(CasesSmall, NumbersDoNotDependOnTheLayout) {
  Case c = all_cases().front();
  c.batch = 2;
  c.seqlen_q = c.seqlen_k = 5;
  c.headdim = c.headdim_v = 3;
  const CaseInputs plain = make_inputs(c);
  for (Layout layout : {Layout::kBhsd, Layout::kPacked, Layout::kPadded}) {
    c.layout = layout;
    const CaseInputs other = make_inputs(c);
    EXPECT_TRUE(same_bits(read(plain.q), read(other.q))) << name_of(layout);
    EXPECT_TRUE(same_bits(read(plain.k), read(other.k))) << name_of(layout);
    EXPECT_TRUE(same_bits(read(plain.v), read(other.v))) << name_of(layout);
    EXPECT_TRUE(same_bits(read(plain.dout), read(other.dout))) << name_of(layout);
  }
}

// The judge itself: it must see what it is there to see.
struct Judged : ::testing::Test {
  Judged() {
    c.seqlen_q = 8;
    c.seqlen_k = 16;
    c.nheads = c.nheads_k = 2;
    c.headdim = c.headdim_v = 4;
    inputs = make_inputs(c);
    out = make_forward(c);
    tensors.q = inputs.q;
    tensors.k = inputs.k;
    tensors.v = inputs.v;
    tensors.o = out.o;
    tensors.lse = out.lse;
    forward(tensors, options());
    good_o = read(out.o);
    good_lse = read(out.lse);
  }
  Options options() const {
    Options o;
    o.backend = Backend::kReference;
    return o;
  }
  std::vector<TensorVerdict> judge_with(size_t index, double o_value, double lse_value) {
    Dense o = good_o, lse = good_lse;
    o[index] = o_value;
    lse[index] = lse_value;
    write(out.o, o);
    write(out.lse, lse);
    return verify(tensors, options());
  }
  Case c;
  CaseInputs inputs;
  CaseForward out;
  ForwardTensors tensors;
  Dense good_o, good_lse;
};
using JudgeSmall = Judged;

TEST_F(JudgeSmall, AcceptsTheOracle) {
  for (const TensorVerdict& v : verify(tensors, options())) EXPECT_TRUE(v.pass) << v.message;
}
TEST_F(JudgeSmall, SeesOneWrongElement) {
  const auto v = judge_with(13, good_o[13] + 1e-3, good_lse[13] - 1e-3);
  for (size_t i : {0u, 1u}) {
    EXPECT_FALSE(v[i].pass);
    EXPECT_EQ(v[i].first_bad, 13);
    EXPECT_NEAR(v[i].error, 1e-3, 1e-5);
  }
  EXPECT_NE(v[0].message.find("o[0, 1, 1, 1]"), std::string::npos) << v[0].message;
  EXPECT_NE(v[1].message.find("lse[0, 1, 5]"), std::string::npos) << v[1].message;
}
TEST_F(JudgeSmall, NeverPassesNanOrInf) {
  for (double bad : {std::nan(""), HUGE_VAL, -HUGE_VAL})
    for (const TensorVerdict& v : judge_with(3, bad, bad)) EXPECT_FALSE(v.pass) << v.tensor << " " << bad;
}
TEST_F(JudgeSmall, AllowsNoMoreThanAFewRoundings) {
  for (const TensorVerdict& v : verify(tensors, options())) EXPECT_LT(v.allowed, 3e-6) << v.tensor;
}

// o with weights relative to `reference(row's scores)`, rounded to the dtype for their product with v; the row sum takes them unrounded. With the
// true maximum it is FlashAttention-2's way.
template <class Reference>
Dense fused_o(const Case& c, const CaseInputs& in, const Reference& reference) {
  const Dense q = read(in.q), k = read(in.k), v = read(in.v);
  Dense o(q.size());
  std::vector<float> scores(static_cast<size_t>(c.seqlen_k)), sums(static_cast<size_t>(c.headdim));
  const auto at = [&](int64_t row, int64_t head, int64_t heads) { return static_cast<size_t>((row * heads + head) * c.headdim); };
  for (int64_t h = 0; h < c.nheads; ++h)
    for (int64_t i = 0; i < c.seqlen_q; ++i) {
      const int64_t hk = h / (c.nheads / c.nheads_k);
      for (int64_t j = 0; j < c.seqlen_k; ++j) {
        float s = 0;
        for (size_t d = 0; d < sums.size(); ++d)
          s += static_cast<float>(q[at(i, h, c.nheads) + d]) * static_cast<float>(k[at(j, hk, c.nheads_k) + d]);
        scores[static_cast<size_t>(j)] = s * static_cast<float>(c.scale());
      }
      const float base = reference(scores);
      float total = 0;
      std::fill(sums.begin(), sums.end(), 0.0f);
      for (int64_t j = 0; j < c.seqlen_k; ++j) {
        const float weight = std::exp(scores[static_cast<size_t>(j)] - base);
        const auto rounded = static_cast<float>(round_to(c.dtype, weight));
        total += weight;
        for (size_t d = 0; d < sums.size(); ++d) sums[d] += rounded * static_cast<float>(v[at(j, hk, c.nheads_k) + d]);
      }
      for (size_t d = 0; d < sums.size(); ++d) o[at(i, h, c.nheads) + d] = round_to(c.dtype, sums[d] / total);
    }
  return o;
}

// Where few keys have most of a row's weight, a largest weight that is not 1 and is rounded, beside a sum that is not, makes RMS errors of o 1.3
// times those of FlashAttention-2. The largest error does not tell the two apart; the second bound must.
TEST(Judge, SeesWeightsThatAreNotRelativeToTheMaximum) {
  for (Inputs inputs : {Inputs::kSigma2, Inputs::kSigma3}) {
    Case c;
    c.dtype = DType::kBF16;
    c.seqlen_q = 512;
    c.seqlen_k = 640;
    c.nheads = 4;
    c.nheads_k = 2;
    c.backward = false;
    c.inputs = inputs;
    const CaseInputs in = make_inputs(c);
    const CaseForward out = make_forward(c);
    ForwardTensors tensors;
    tensors.q = in.q;
    tensors.k = in.k;
    tensors.v = in.v;
    tensors.o = out.o;
    const auto verdict = [&](const Dense& o) {
      write(out.o, o);
      return verify(tensors, Options())[0];
    };
    const TensorVerdict peer = verdict(fused_o(c, in, [](const std::vector<float>& s) { return *std::max_element(s.begin(), s.end()); }));
    EXPECT_TRUE(peer.pass) << peer.message;
    EXPECT_NEAR(peer.rms, peer.rms_peer, 0.01 * peer.rms_peer);
    const TensorVerdict early = verdict(fused_o(c, in, [](const std::vector<float>& s) { return *std::max_element(s.end() - 128, s.end()); }));
    EXPECT_FALSE(early.pass) << name_of(inputs);
    EXPECT_GT(early.rms, 1.2 * early.rms_peer) << name_of(inputs);
    EXPECT_LE(early.error, early.allowed) << "by its largest error: then this test shows nothing";
    EXPECT_NE(early.message.find("RMS"), std::string::npos) << early.message;
    // Textbook rounding has the first bound only.
    Options standard;
    standard.algorithm = Algorithm::kStandard;
    EXPECT_TRUE(verify(tensors, standard)[0].pass);
  }
}

TEST(GuardSmall, SeesAWriteBesideAnElement) {
  Case c;
  c.layout = Layout::kPadded;
  c.seqlen_q = 3;
  c.nheads = 2;
  c.headdim_v = 5;
  CaseForward out = make_forward(c);
  EXPECT_EQ(out.blocks[0].damage(), "");
  auto* o = static_cast<float*>(out.o.data());
  write(out.o, Dense(static_cast<size_t>(out.o.size()), 1.0));
  EXPECT_EQ(out.blocks[0].damage(), "");
  const float saved = o[5];
  o[5] = 0;  // the padding after the first head
  EXPECT_NE(out.blocks[0].damage(), "");
  o[5] = saved;
  o[-1] = 0;
  EXPECT_NE(out.blocks[0].damage(), "");
}

}  // namespace
}  // namespace fattn::testing
