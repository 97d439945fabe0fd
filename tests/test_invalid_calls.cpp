// Bad input: threads, executors, pointers, overlapping outputs, the workspace; and what is valid, but not here.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "fattn/fattn.hpp"
#include "invalid_problem.h"
#include "thrown.h"

namespace fattn {
namespace {

using namespace test;

TEST(InvalidSmall, NumberOfThreads) {
  for (int32_t n : {-1, 4097, std::numeric_limits<int32_t>::min()}) {
    Good g;
    g.problem.num_threads = n;
    expect_invalid(g.problem, {"num_threads is " + std::to_string(n), "4096"});
  }
}
TEST(InvalidSmall, Executor) {
  fattn_executor executor{};
  executor.struct_size = sizeof executor;
  executor.concurrency = 2;
  Good g;
  g.problem.executor = &executor;
  expect_invalid(g.problem, {"executor", "null parallel"});
  executor.parallel = [](void*, int32_t, void (*)(void*, int32_t), void*) -> int32_t { return 0; };
  executor.concurrency = 0;
  expect_invalid(g.problem, {"executor has concurrency 0"});
}

TEST(InvalidSmall, NullPointers) {
  each_tensor([](fattn_tensor& t, const char*) {
    t.data = nullptr;
    return std::string("null pointer");
  });
}
TEST(InvalidSmall, NullIsFineWhereThereIsNothing) {
  Good g;
  for (fattn_tensor* t : {&g.problem.q, &g.problem.o, &g.problem.lse}) t->shape[t->ndim == 3 ? 2 : 1] = 0, t->data = nullptr;
  EXPECT_EQ(fattn_execute(&g.problem), FATTN_OK) << fattn_last_error();
}
TEST(InvalidSmall, MisalignedPointers) {
  each_tensor([](fattn_tensor& t, const char*) {
    t.data = static_cast<char*>(t.data) + 2;
    return std::string("not aligned");
  });
}

// Every output over every other tensor of the call.
TEST(InvalidSmall, OutputsOverOtherTensors) {
  for (bool backward : {false, true}) {
    const Good good(backward);
    for (const Named& out : kBackwardNames)
      for (const Named& other : kBackwardNames) {
        const auto is_output = [&](const Named& n) {
          return backward ? n.name[0] == 'd' && n.member != &fattn_problem::dout : n.member == &fattn_problem::o || n.member == &fattn_problem::lse;
        };
        if (!is_output(out) || out.member == other.member || (!backward && other.name[0] == 'd')) continue;
        SCOPED_TRACE(std::string(backward ? "backward " : "forward ") + out.name + " over " + other.name);
        fattn_problem p = good.problem;
        (p.*out.member).data = (p.*other.member).data;
        expect_invalid(p, {out.name, other.name, "overlaps"});
        p = good.problem;  // the last element of one is the first of the other
        const fattn_tensor& t = p.*other.member;
        int64_t last = 0;
        for (int d = 0; d < t.ndim; ++d) last += (t.shape[d] - 1) * t.strides[d];
        (p.*out.member).data = static_cast<float*>(t.data) + last;
        EXPECT_EQ(fattn_execute(&p), FATTN_ERROR_INVALID_ARGUMENT) << fattn_last_error();
      }
  }
}
TEST(InvalidSmall, OutputsOverThemselves) {
  for (bool backward : {false, true}) {
    const Good good(backward);
    for (const Named& n : kBackwardNames) {
      const bool output =
          backward ? n.name[0] == 'd' && n.member != &fattn_problem::dout : n.member == &fattn_problem::o || n.member == &fattn_problem::lse;
      if (!output) continue;
      for (int d = 0; d < 2; ++d) {
        fattn_problem p = good.problem;
        (p.*n.member).strides[d] = 0;
        SCOPED_TRACE(n.name);
        expect_invalid(p, {std::string(n.name) + " is an output"});
      }
    }
  }
}
TEST(InvalidSmall, SharedInputsAreFine) {
  Good g;
  g.problem.v.data = g.problem.k.data;  // v's columns lie in k's memory
  EXPECT_EQ(fattn_execute(&g.problem), FATTN_OK) << fattn_last_error();
  g.problem.k.strides[0] = g.problem.v.strides[0] = 0;  // expanded over the batch
  EXPECT_EQ(fattn_execute(&g.problem), FATTN_OK) << fattn_last_error();
}
TEST(InvalidSmall, PackedGradientsAreFine) {
  std::vector<float> qkv(2 * 5 * 3 * 2 * 4, 0.25f), dqkv(qkv.size()), o(2 * 5 * 2 * 4, 0.25f), dout(o.size(), 1.0f), lse(2 * 2 * 5, 2.0f);
  const auto slice = [](std::vector<float>& x, int i) { return Tensor(x.data() + i * 8, DType::kF32, {2, 5, 2, 4}, {120, 24, 4, 1}); };
  const Tensor o_view(o.data(), DType::kF32, {2, 5, 2, 4}), dout_view(dout.data(), DType::kF32, {2, 5, 2, 4}),
      lse_view(lse.data(), DType::kF32, {2, 2, 5});
  EXPECT_NO_THROW(
      backward({slice(qkv, 0), slice(qkv, 1), slice(qkv, 2), o_view, lse_view, dout_view, slice(dqkv, 0), slice(dqkv, 1), slice(dqkv, 2)}));
  EXPECT_THROW(backward({slice(qkv, 0), slice(qkv, 1), slice(qkv, 2), o_view, lse_view, dout_view, slice(dqkv, 0), slice(dqkv, 1), slice(dqkv, 1)}),
               Error);
}

// Where a workspace may begin, in 64 bytes more than it has.
unsigned char* aligned_in(std::vector<unsigned char>& memory) { return memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64; }

TEST(InvalidSmall, WorkspaceTooSmallMisalignedOrNull) {
  size_t tried = 0;
  for (bool backward : {false, true}) {
    const Good good(backward, Backend::kAuto);
    const Plan plan(good.problem);
    const size_t bytes = plan.workspace_bytes();
    fattn_plan* raw = nullptr;
    ASSERT_EQ(fattn_plan_create(&good.problem, &raw), FATTN_OK);
    const std::unique_ptr<fattn_plan, void (*)(fattn_plan*)> owner(raw, fattn_plan_destroy);
    fattn_buffers b{};
    b.struct_size = sizeof b;
    const fattn_problem& p = good.problem;
    b.q = p.q.data, b.k = p.k.data, b.v = p.v.data, b.o = p.o.data, b.lse = p.lse.data;
    b.dout = p.dout.data, b.dq = p.dq.data, b.dk = p.dk.data, b.dv = p.dv.data;
    std::vector<unsigned char> memory(bytes + 128);
    auto* aligned = aligned_in(memory);
    b.workspace = aligned;
    b.workspace_bytes = bytes;
    EXPECT_EQ(fattn_plan_execute(raw, &b), FATTN_OK) << fattn_last_error();
    if (bytes == 0) continue;
    ++tried;
    b.workspace_bytes = bytes - 1;
    EXPECT_EQ(fattn_plan_execute(raw, &b), FATTN_ERROR_WORKSPACE);
    EXPECT_NE(std::string(fattn_last_error()).find(std::to_string(bytes)), std::string::npos) << fattn_last_error();
    b.workspace_bytes = bytes;
    b.workspace = aligned + 32;
    EXPECT_EQ(fattn_plan_execute(raw, &b), FATTN_ERROR_WORKSPACE);
    EXPECT_NE(std::string(fattn_last_error()).find("aligned to 64"), std::string::npos) << fattn_last_error();
    b.workspace = nullptr;
    EXPECT_EQ(fattn_plan_execute(raw, &b), FATTN_ERROR_WORKSPACE);
  }
  if (tried == 0) GTEST_SKIP() << "no pass of the default backend needs a workspace here";
}

// A plan computes what it was made for: tensors of another shape would be read beyond their end.
TEST(InvalidSmall, TensorsThatAPlanWasNotMadeFor) {
  std::vector<float> q(2 * 6 * 4 * 16, 0.5f), k(2 * 8 * 2 * 16, 0.5f), o(q.size()), lse(2 * 4 * 6);
  ForwardTensors good;
  good.q = Tensor(q.data(), DType::kF32, {2, 6, 4, 16});
  good.k = good.v = Tensor(k.data(), DType::kF32, {2, 8, 2, 16});
  good.o = Tensor(o.data(), DType::kF32, {2, 6, 4, 16});
  good.lse = Tensor(lse.data(), DType::kF32, {2, 4, 6});
  const Plan plan(good, {});
  std::vector<unsigned char> memory(plan.workspace_bytes() + 64);
  void* const workspace = aligned_in(memory);
  const auto expect = [&](const std::string& words, const auto& tensors) {
    const std::string message = thrown_by([&] { plan.execute(tensors, workspace, plan.workspace_bytes()); });
    EXPECT_NE(message.find(words), std::string::npos) << "no '" << words << "' in: " << message;
  };
  const auto with = [&](auto ForwardTensors::*member, const Tensor& tensor) {
    ForwardTensors t = good;
    t.*member = tensor;
    return t;
  };
  std::vector<float> elsewhere(q);
  expect("nothing was thrown", with(&ForwardTensors::q, Tensor(elsewhere.data(), DType::kF32, {2, 6, 4, 16})));
  expect(
      "q is fp32 of shape (2, 3, 4, 16) and strides (192, 64, 16, 1) on the CPU; in this plan it is fp32 of shape (2, 6, 4, 16) and strides "
      "(384, 64, 16, 1) on the CPU. Make a plan for these tensors, or pass those that it was made for",
      with(&ForwardTensors::q, Tensor(q.data(), DType::kF32, {2, 3, 4, 16})));
  expect("v is bf16 of shape", with(&ForwardTensors::v, Tensor(k.data(), DType::kBF16, {2, 8, 2, 16})));
  expect("k is fp32 of shape (2, 8, 2, 16) and strides (256, 16, 128, 1)",
         with(&ForwardTensors::k, Tensor(k.data(), DType::kF32, {2, 2, 8, 16}).transposed(1, 2)));
  expect("on CUDA device 3; in this plan", with(&ForwardTensors::o, good.o.on(Device::kCuda, 3, o.data())));
  expect("lse is absent; in this plan it is fp32", with(&ForwardTensors::lse, {}));
  ForwardTensors more = good;
  more.scores.sinks = Tensor(k.data(), DType::kF32, {4});
  expect("on the CPU; in this plan it is absent", more);
  expect("dout is fp32", BackwardTensors{good.q, good.k, good.v, good.o, good.lse, good.q, good.q, good.k, good.v});
}
TEST(InvalidSmall, StridesAlongOneElementReachNothing) {
  std::vector<float> x(8 * 16, 0.5f), o(16);
  ForwardTensors t;
  t.q = Tensor(x.data(), DType::kF32, {1, 1, 1, 16});
  t.k = t.v = Tensor(x.data(), DType::kF32, {1, 8, 1, 16});
  t.o = Tensor(o.data(), DType::kF32, {1, 1, 1, 16});
  const Plan plan(t, {});
  std::vector<unsigned char> memory(plan.workspace_bytes() + 64);
  t.q = Tensor(x.data(), DType::kF32, {1, 1, 1, 16}, {7, 5, 3, 1});
  EXPECT_NO_THROW(plan.execute(t, aligned_in(memory), plan.workspace_bytes()));
}

TEST(InvalidSmall, StridesOfATensorWithoutElementsReachNothing) {
  std::vector<float> x(8 * 16, 0.5f);
  ForwardTensors t;
  t.q = Tensor(nullptr, DType::kF32, {0, 4, 1, 16});
  t.k = t.v = Tensor(nullptr, DType::kF32, {0, 8, 1, 16});
  t.o = Tensor(nullptr, DType::kF32, {0, 4, 1, 16});
  const Plan plan(t, {});
  std::vector<unsigned char> memory(plan.workspace_bytes() + 64);
  void* const workspace = aligned_in(memory);
  t.q = Tensor(x.data(), DType::kF32, {0, 4, 1, 16}, {7, 5, 3, 1});
  EXPECT_NO_THROW(plan.execute(t, workspace, plan.workspace_bytes()));
  t.q = Tensor(x.data(), DType::kF32, {0, 5, 1, 16});
  EXPECT_THROW(plan.execute(t, workspace, plan.workspace_bytes()), Error);
}
TEST(InvalidSmall, ReservedMembersStayZero) {
  const Good good(false, Backend::kAuto);
  fattn_plan* raw = nullptr;
  ASSERT_EQ(fattn_plan_create(&good.problem, &raw), FATTN_OK);
  const std::unique_ptr<fattn_plan, void (*)(fattn_plan*)> owner(raw, fattn_plan_destroy);
  fattn_buffers b{};
  b.struct_size = sizeof b;
  b.reserved = 3;
  EXPECT_EQ(fattn_plan_execute(raw, &b), FATTN_ERROR_INVALID_ARGUMENT);
  EXPECT_STREQ(fattn_last_error(), "buffers.reserved is 3; it must be 0: clear the struct before it is filled");
  fattn_trace trace{};
  trace.struct_size = sizeof trace;
  trace.reserved = 1;
  EXPECT_EQ(fattn_set_trace(&trace), FATTN_ERROR_INVALID_ARGUMENT);
  EXPECT_STREQ(fattn_last_error(), "trace.reserved is 1; it must be 0: clear the struct before it is filled");
  fattn_rotary_problem rotary{};
  rotary.struct_size = sizeof rotary;
  rotary.abi_version = FATTN_ABI_VERSION;
  rotary.reserved = 2;
  EXPECT_EQ(fattn_rotary(&rotary), FATTN_ERROR_INVALID_ARGUMENT);
  EXPECT_STREQ(fattn_last_error(), "problem.reserved is 2; it must be 0: clear the struct before it is filled");
  rotary.abi_version = FATTN_ABI_VERSION + 1;  // of a header in which the member may have a meaning
  EXPECT_EQ(fattn_rotary(&rotary), FATTN_ERROR_ABI);
  fattn_group_options options{};
  options.struct_size = sizeof options;
  options.reserved = 1;
  fattn_group* group = nullptr;
  EXPECT_EQ(fattn_group_create(&options, &group), FATTN_ERROR_INVALID_ARGUMENT);
  EXPECT_STREQ(fattn_last_error(), "options.reserved is 1; it must be 0: clear the struct before it is filled");
  fattn_cpu_info info{};  // the library fills it
  info.struct_size = sizeof info;
  info.reserved = 1;
  EXPECT_EQ(fattn_query_cpu(&info), FATTN_OK);
}

// Valid, but nothing here can do it.
TEST(UnsupportedSmall, IsaThatIsNotHere) {
  const fattn_cpu_info cpu = cpu_info();
  int missing = 0;
  for (Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmx, Isa::kNeon}) {
    Good g(false, Backend::kCpu);
    g.problem.cpu_isa = static_cast<int32_t>(isa);
    if (available(cpu, isa)) continue;
    ++missing;
    expect_error(g.problem, FATTN_ERROR_UNSUPPORTED, {name_of(isa), "scalar"});  // the offender, and what there is
  }
  EXPECT_GE(missing, 1);  // x86 lacks NEON, AArch64 lacks AVX2
}
TEST(UnsupportedSmall, WeightsWithoutTheScoreMatrix) {
  Good g(false, Backend::kCpu);
  std::vector<float> weights(static_cast<size_t>(kBatch * kNheads * kSeqlenQ * kSeqlenK));
  g.problem.algorithm = FATTN_ALGORITHM_V2;
  g.problem.weights = Tensor(weights.data(), DType::kF32, {kBatch, kNheads, kSeqlenQ, kSeqlenK}).raw();
  expect_error(g.problem, FATTN_ERROR_UNSUPPORTED, {"weights", "standard"});
}
TEST(UnsupportedSmall, Fp64OnTheCpuBackend) {
  Good g(false, Backend::kCpu);
  for (fattn_tensor* t : {&g.problem.q, &g.problem.k, &g.problem.v, &g.problem.o, &g.problem.lse}) t->dtype = FATTN_F64;
  expect_error(g.problem, FATTN_ERROR_UNSUPPORTED, {"fp64", "reference"});
  char reason[512] = "";
  EXPECT_EQ(fattn_supported(&g.problem, reason, sizeof reason), FATTN_ERROR_UNSUPPORTED);
  EXPECT_NE(std::string(reason).find("fp64"), std::string::npos) << reason;
}
TEST(UnsupportedSmall, WeightsOfABackwardPass) {
  Good g(true);
  std::vector<float> weights(static_cast<size_t>(kBatch * kNheads * kSeqlenQ * kSeqlenK));
  g.problem.weights = Tensor(weights.data(), DType::kF32, {kBatch, kNheads, kSeqlenQ, kSeqlenK}).raw();
  expect_invalid(g.problem, {"weights", "forward"});
}
TEST(UnsupportedSmall, FailedCallsLeaveTheLibraryUsable) {
  for (int i = 0; i < 3; ++i) {
    Good bad, good;
    bad.problem.q.dtype = 77;
    EXPECT_NE(fattn_execute(&bad.problem), FATTN_OK);
    EXPECT_EQ(fattn_execute(&good.problem), FATTN_OK) << fattn_last_error();
  }
}

}  // namespace
}  // namespace fattn
