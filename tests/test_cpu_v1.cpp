// Algorithm v1 on the CPU, beside what the table of cases shows: its blocks and its memory, every instruction set at the ends of blocks, and v2's
// results from other loops.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "fattn/fattn.hpp"
#include "plan/plan.h"
#include "testing/check.h"
#include "testing/random.h"
#include "testing/run.h"
#include "testing/targets.h"

namespace fattn::testing {
namespace {

Case shape(DType dtype, int64_t seqlen_q, int64_t seqlen_k, int64_t headdim, bool causal) {
  Case c;
  c.dtype = dtype;
  c.seqlen_q = seqlen_q;
  c.seqlen_k = seqlen_k;
  c.nheads = 2;
  c.headdim = c.headdim_v = headdim;
  c.causal = causal;
  return c;
}

Options v1(const Case& c) { return options_of(c, {Backend::kCpu, Algorithm::kV1}); }

// Without memory, for plans.
struct Views {
  ForwardTensors forward;
  BackwardTensors backward;
  explicit Views(const Case& c) {
    const auto rows = [&](int64_t seqlen, int64_t heads, int64_t headdim) { return Tensor(nullptr, c.dtype, {c.batch, seqlen, heads, headdim}); };
    const Tensor q = rows(c.seqlen_q, c.nheads, c.headdim), k = rows(c.seqlen_k, c.nheads_k, c.headdim),
                 v = rows(c.seqlen_k, c.nheads_k, c.headdim_v);
    const Tensor o = rows(c.seqlen_q, c.nheads, c.headdim_v), lse(nullptr, DType::kF32, {c.batch, c.nheads, c.seqlen_q});
    forward = {q, k, v, o, lse, {}};
    backward = {q, k, v, o, lse, o, q, k, v};
  }
};

struct Tensors {
  CaseInputs in;
  CaseForward out;
  CaseGradients grads;
  explicit Tensors(const Case& c) : in(make_inputs(c)), out(make_forward(c)), grads(make_gradients(c)) {}
  ForwardTensors forward() const { return {in.q, in.k, in.v, out.o, out.lse, {}}; }
  BackwardTensors backward() const { return {in.q, in.k, in.v, out.o, out.lse, in.dout, grads.dq, grads.dk, grads.dv}; }
};

TEST(CpuV1Small, BlocksAreThoseOfThePaper) {
  struct Blocks {
    int64_t headdim, headdim_v, keys, rows;
  };
  for (const Blocks& b : {Blocks{64, 64, 256, 64},
                          {128, 128, 128, 128},
                          {256, 256, 64, 64},
                          {80, 80, 205, 80},
                          {64, 16, 256, 64},
                          {16, 64, 256, 64},
                          {1, 1, 16384, 1},
                          {576, 576, 29, 29}})
    for (const int threads : {1, 7}) {
      Case c = shape(DType::kBF16, 300, 300, b.headdim, true);
      c.headdim_v = b.headdim_v;
      const Views views(c);
      Options options = v1(c);
      options.cpu_isa = Isa::kScalar;
      options.num_threads = threads;
      const auto plan_of = [&](const auto& tensors) {
        return core::make_plan(core::validate(describe(tensors, options)), core::cpu_info(),
                               [](int) -> const core::CudaDeviceInfo& { throw std::logic_error("no GPU"); });
      };
      for (const core::Plan& plan : {plan_of(views.forward), plan_of(views.backward)}) {
        EXPECT_EQ(plan.cpu.block_k, b.keys) << plan.why;
        EXPECT_EQ(plan.cpu.rows, b.rows) << plan.why;
        EXPECT_EQ(plan.kernel, std::string("cpu v1 ") + (plan.problem.backward ? "backward" : "forward") + " bf16 scalar");
      }
    }
}

TEST(CpuV1Small, WeightsAreRefused) {
  const Case c = shape(DType::kF32, 8, 8, 16, false);
  std::vector<float> weights(2 * 8 * 8);
  ForwardTensors forward = Views(c).forward;
  forward.weights = Tensor(weights.data(), DType::kF32, {1, 2, 8, 8});
  const std::string reason = supported(describe(forward, v1(c))).reason;
  EXPECT_NE(reason.find("algorithm v1 never has the weights in memory"), std::string::npos) << reason;
}

// What a worker keeps in memory is one head's: m and l, in 16 bits o or dq in fp32. The rest is what the cache is to hold, whatever the lengths.
TEST(CpuV1Small, MemoryIsThatOfAHeadAWorker) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16})
    for (const int threads : {1, 3}) {
      const auto bytes = [&](int64_t seqlen, int64_t batch, bool backward) {
        Case c = shape(dtype, seqlen, seqlen, 64, true);
        c.batch = batch;
        c.nheads = 12;
        c.nheads_k = 4;
        Options options = v1(c);
        options.num_threads = threads;
        const Views views(c);
        return static_cast<int64_t>(backward ? Plan(views.backward, options).workspace_bytes() : Plan(views.forward, options).workspace_bytes());
      };
      const int64_t sums = dtype == DType::kF32 ? 0 : 64 * 4;
      EXPECT_EQ(bytes(2048, 1, false) - bytes(1024, 1, false), threads * 1024 * (8 + sums));
      EXPECT_EQ(bytes(2048, 1, true) - bytes(1024, 1, true), threads * 1024 * 3 * sums);  // of the three heads that share a key head
      EXPECT_EQ(bytes(1024, 1, false), bytes(1024, 3, false));
      EXPECT_EQ(bytes(1024, 1, true), bytes(1024, 3, true));
      EXPECT_LT(bytes(1024, 1, true), threads * (int64_t{1} << 20) + threads * 1024 * 3 * sums);
    }
}

// Where blocks of keys and of rows end, with vectors of every length.
TEST(CpuV1, EveryInstructionSetAtTheEndsOfBlocks) {
  int ran = 0;
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    std::vector<Case> cases = {shape(dtype, 65, 129, 256, true), shape(dtype, 64, 64, 256, true), shape(dtype, 33, 513, 32, false),
                               shape(dtype, 70, 50, 80, true),   shape(dtype, 5, 61, 19, true),   shape(dtype, 3, 7, 1, false)};
    cases[3].headdim_v = 48;
    cases[4].headdim_v = 100;
    cases[4].softmax_scale = -0.3;
    for (const Case& c : cases) {
      const PreparedCase prepared(c);
      for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmx, Isa::kNeon}) {
        const Target target{Backend::kCpu, Algorithm::kV1, isa, 2};
        if (!why_unavailable(target, dtype).empty()) continue;
        const CaseResult result = prepared.run(target);
        EXPECT_TRUE(result.passed()) << name_of(target) << " " << name_of(c) << ": " << result.summary();
        ++ran;
      }
    }
  }
  EXPECT_GE(ran, 18);
}

// Within what each may differ from the truth.
void expect_close(const Dense& a, const Dense& b, double allowed, const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference = a[i] == b[i] ? 0 : std::fabs(a[i] - b[i]);  // -inf is -inf
    if (!(difference <= most)) most = std::isnan(difference) ? HUGE_VAL : difference;
  }
  EXPECT_TRUE(most <= allowed) << what << " differs by " << most << ", allowed " << allowed;
}

TEST(CpuV1, HasTheResultsOfV2) {
  constexpr int64_t kHeaddims[] = {8, 17, 40, 64, 96, 128, 200};
  for (uint64_t n = 0; n < 5; ++n) {
    const Random random(n, 35);
    const auto below = [&](uint64_t i, int64_t end) { return static_cast<int64_t>(random.uniform(i) * static_cast<double>(end)); };
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      Case c = shape(dtype, 1 + below(0, 260), 1 + below(1, 600), kHeaddims[below(2, 7)], n % 2 == 0);
      c.nheads = 4;
      c.nheads_k = int64_t{1} << below(3, 3);
      c.headdim_v = kHeaddims[below(4, 7)];
      c.seed = n + 1;
      const Tensors ours(c), other(c);
      Options options = v1(c);
      forward(ours.forward(), options);
      options.algorithm = Algorithm::kV2;
      forward(other.forward(), options);
      const std::string what = name_of(c);
      const std::vector<TensorVerdict> verdicts = verify(other.forward(), options);
      expect_close(read(ours.out.o), read(other.out.o), 2 * verdicts[0].allowed, what + " o");
      expect_close(read(ours.out.lse), read(other.out.lse), 2 * verdicts[1].allowed, what + " lse");

      // Of the same o and lse.
      backward(other.backward(), options);
      const CaseGradients grads = make_gradients(c);
      BackwardTensors same = other.backward();
      same.dq = grads.dq;
      same.dk = grads.dk;
      same.dv = grads.dv;
      options.algorithm = Algorithm::kV1;
      backward(same, options);
      for (const TensorVerdict& verdict : verify(same, options)) {
        EXPECT_TRUE(verdict.pass) << what << ": " << verdict.message;
        const bool dq = verdict.tensor == "dq", dk = verdict.tensor == "dk";
        expect_close(read(dq   ? grads.dq
                          : dk ? grads.dk
                               : grads.dv),
                     read(dq   ? other.grads.dq
                          : dk ? other.grads.dk
                               : other.grads.dv),
                     2 * verdict.allowed, what + " " + verdict.tensor);
      }
    }
  }
}

// A row whose scores are all -inf is empty, whatever its values are; one that sees something in a later block is not.
TEST(CpuV1Small, RowsOfScoresOfMinusInfinityAreEmpty) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16})
    for (const bool later : {false, true}) {
      Case c = shape(dtype, 9, 300, 64, false);
      c.nheads = c.nheads_k = 1;
      c.backward = false;
      const CaseInputs in = make_inputs(c);
      const CaseForward out = make_forward(c);
      write(in.q, Dense(static_cast<size_t>(in.q.size()), 1.0));
      Dense k(static_cast<size_t>(in.k.size()), -kInfinity), v(static_cast<size_t>(in.v.size()), later ? 2.0 : kInfinity);
      if (later) std::fill(k.begin() + 290 * 64, k.end(), 0.5);
      write(in.k, k);
      write(in.v, v);
      forward({in.q, in.k, in.v, out.o, out.lse, {}}, v1(c));
      for (const double x : read(out.o)) ASSERT_EQ(x, later ? 2.0 : 0.0) << name_of(dtype);
      for (const double x : read(out.lse))
        ASSERT_TRUE(later ? std::fabs(x - 4 - std::log(10.0)) < 1e-6 : x == -kInfinity) << x << " " << name_of(dtype);
    }
}

}  // namespace
}  // namespace fattn::testing
