// From the public API to the launch, with stubs of driver and NVRTC: which kernels are launched with what, errors on the way,
// what is allocated. What the kernels compute is for a real GPU (test_cuda_gpu, `fattn check --device cuda`).
#include <gtest/gtest.h>

#include <cstdint>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "cuda_backend.h"
#include "device_abi/v3_f32_parts.h"
#include "fattn/attention.hpp"
#include "fattn/device.hpp"
#include "fattn/plan.hpp"
#include "stub/cuda_stub.h"

namespace fattn {
namespace {

using test::expect_contains;
using namespace test::launches;

TEST_F(CudaBackend, ABufferThatWasMovedFromIsEmpty) {
  const int64_t alive = stub().alive("allocations");
  cuda::Buffer first(0, 100);
  cuda::Buffer second(std::move(first));
  EXPECT_EQ(first.get(), nullptr);
  EXPECT_EQ(first.bytes(), 0u);
  EXPECT_EQ(second.bytes(), 100u);
  EXPECT_THROW(first.copy_from("x", 1), Error) << "no byte is inside it";
  first = std::move(second);
  EXPECT_EQ(second.bytes(), 0u);
  EXPECT_EQ(first.bytes(), 100u);
  cuda::Buffer& same = first;
  first = std::move(same);
  EXPECT_EQ(first.bytes(), 100u) << "moved to itself";
  EXPECT_EQ(stub().alive("allocations"), alive + 1);
}

// fp32 on Hopper: keys and values are split into the workspace, and the kernel behind that one may come up early. Any address will do.
TEST_F(CudaBackend, Fp32SplitsKeysAndValuesFirst) {
  const OnDevice d(DType::kF32);
  Options options;
  const Plan plan(d.forward, options);  // 200 queries of a key head
  expect_contains(plan.info().kernel, "cuda v3 forward fp32");
  constexpr size_t kBlocks = OnDevice::kBatch * OnDevice::kHeadsK * 2;  // of 64 of 100 keys
  EXPECT_EQ(plan.workspace_bytes(), kBlocks * (2 * (64 * 64 * 4 + 16) + sizeof(V3F32Spoilt)));
  cuda::Buffer workspace(0, plan.workspace_bytes());
  const int64_t early = stub().alive("early launches");
  plan.execute(d.forward, workspace.get(), workspace.bytes(), nullptr);
  EXPECT_EQ(launched, (std::vector<std::string>{"s", "W"}));
  EXPECT_EQ(stub().alive("early launches"), early + 1);
  EXPECT_EQ(last.q, d.forward.q.data());
  EXPECT_EQ(last.o, d.forward.o.data());
  EXPECT_EQ(last.lse, d.forward.lse.data());
  ForwardTensors odd = d.forward;
  odd.q = odd.q.on(Device::kCuda, 0, static_cast<float*>(d.forward.q.data()) + 1);
  launched.clear();
  plan.execute(odd, workspace.get(), workspace.bytes(), nullptr);
  EXPECT_EQ(launched, (std::vector<std::string>{"s", "W"}));
  EXPECT_EQ(last.q, odd.q.data());

  options.softcap = 3;
  expect_contains(Plan(d.forward, options).info().kernel, "cuda v2 forward fp32");
  options.algorithm = Algorithm::kV3;
  expect_contains(error_thrown_by([&] { Plan(d.forward, options); }), "algorithm v3 has no softcap in fp32");
}

TEST_F(CudaBackend, ForwardLaunchesOneKernelWithTheProblem) {
  const OnDevice d;
  Options options;
  options.causal = true;
  options.algorithm = Algorithm::kV3;
  forward(d.forward, options);  // the stub's device is of capability 9.0
  EXPECT_EQ(launched, std::vector<std::string>{"3"});
  EXPECT_EQ(Plan(d.forward, options).info().cuda_level, 90);
  options.algorithm = Algorithm::kV2;
  launched.clear();
  forward(d.forward, options);
  EXPECT_EQ(launched, std::vector<std::string>{"f"});
  EXPECT_EQ(last.q, d.forward.q.data());
  EXPECT_EQ(last.o, d.forward.o.data());
  EXPECT_EQ(last.lse, d.forward.lse.data());
  EXPECT_EQ(last.batch, OnDevice::kBatch);
  EXPECT_EQ(last.seqlen_k, OnDevice::kSeqlen);
  EXPECT_EQ(last.nheads, OnDevice::kHeads);
  EXPECT_EQ(last.nheads_k, OnDevice::kHeadsK);
  EXPECT_EQ(last.q_strides.row, OnDevice::kHeads * OnDevice::kHeaddim);
  EXPECT_FLOAT_EQ(last.softmax_scale, 0.125f);
  const fattn_plan_info info = Plan(d.forward, options).info();
  EXPECT_EQ(info.backend, FATTN_BACKEND_CUDA);
  EXPECT_EQ(info.cuda_level, 80);
  EXPECT_EQ(info.workspace_bytes, 0u) << "forward adds nothing but its outputs";
}

// Few queries and many keys: by kernels of their own where 16-byte copies take the tensors, under the name of algorithm v2.
TEST_F(CudaBackend, DecodeSplitsTheKeysAndPutsThemTogether) {
  const auto on = [](cuda::Buffer& memory, std::initializer_list<int64_t> shape, int64_t skew = 0) {
    return Tensor(nullptr, DType::kF16, shape).on(Device::kCuda, 0, static_cast<char*>(memory.get()) + skew);
  };
  cuda::Buffer q(0, 1 << 12), k(0, 5 << 18), v(0, 5 << 18), o(0, 1 << 12);
  ForwardTensors t{on(q, {1, 1, 4, 64}), on(k, {1, 5000, 2, 64}), on(v, {1, 5000, 2, 64}), on(o, {1, 1, 4, 64}), {}, {}};
  forward(t);
  EXPECT_EQ(launched, (std::vector<std::string>{"d", "c"}));
  EXPECT_EQ(last.o, t.o.data());
  const Plan plan(t, {});
  EXPECT_EQ(plan.info().algorithm, FATTN_ALGORITHM_V2);
  expect_contains(plan.info().kernel, "cuda v2 decode fp16 sm_90");
  expect_contains(plan.info().why, "2 rows of a key head");
  EXPECT_GT(plan.workspace_bytes(), 0u);
  std::vector<char> host(plan.workspace_bytes() + 256);
  void* const at = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(host.data()) + 255) / 256 * 256);
  expect_contains(error_thrown_by([&] { plan.execute(t, at, plan.workspace_bytes()); }), "workspace");

  launched.clear();
  ForwardTensors skewed = t;
  skewed.k = on(k, {1, 5000, 2, 64}, 2);
  forward(skewed);
  EXPECT_EQ(launched, std::vector<std::string>{"f"});
  launched.clear();
  Options options;
  options.algorithm = Algorithm::kV3;
  forward(t, options);
  EXPECT_EQ(launched, std::vector<std::string>{"3"});

  // Lengths: with many rows, or other addresses, the forward kernels have them.
  cuda::Buffer lengths(0, 64);
  t.scores.seqused_k = Tensor(nullptr, DType::kI32, {1}).on(Device::kCuda, 0, lengths.get());
  const Tensor many = on(k, {1, 300, 4, 64}), few = on(v, {1, 20, 2, 64}), out = on(k, {1, 300, 4, 64}, 1 << 19);
  launched.clear();
  forward(t);
  EXPECT_EQ(launched, (std::vector<std::string>{"d", "c"}));
  skewed.scores = t.scores;
  launched.clear();
  forward(skewed);
  EXPECT_EQ(launched, std::vector<std::string>{"f"});
  launched.clear();
  forward({many, few, few, out, {}, {}, t.scores});
  EXPECT_EQ(launched, std::vector<std::string>{"3"});
  launched.clear();
  forward(t, options);
  EXPECT_EQ(launched, std::vector<std::string>{"3"});
  int32_t host_length = 1;
  t.scores.seqused_k = t.scores.seqused_k.on(Device::kCuda, 0, &host_length);
  expect_contains(error_thrown_by([&] { forward(t); }), "seqused_k");
}

TEST_F(CudaBackend, BackwardLaunchesThreeKernelsInOrder) {
  const OnDevice d;
  Options options;
  options.algorithm = Algorithm::kV2;
  for (const bool deterministic : {false, true}) {
    launched.clear();
    options.deterministic = deterministic;
    backward(d.backward, options);
    EXPECT_EQ(launched, (std::vector<std::string>{"p", "b", "e"}));
    EXPECT_EQ(last.dq, d.backward.dq.data());
    EXPECT_NE(last.dq_accum, nullptr);
    EXPECT_NE(last.row_sum, nullptr);
  }
  // Workspace: dq in fp32 (rows rounded up to 16) and a float a row, nothing else.
  const size_t rows = OnDevice::kBatch * OnDevice::kHeads, dq = rows * 112 * OnDevice::kHeaddim * 4;
  options.deterministic = false;
  EXPECT_LE(Plan(d.backward, options).workspace_bytes(), dq + rows * 128 * 4 + 1024);
}

TEST_F(CudaBackend, ExecuteAllocatesNothingAndWaitsForNothing) {
  const OnDevice d;
  const Plan plan(d.backward, {});
  cuda::Buffer workspace(0, plan.workspace_bytes());
  plan.execute(d.backward, workspace.get(), workspace.bytes());
  const char* const never[] = {"cuMemAlloc_v2",    "cuMemFree_v2",       "cuStreamSynchronize",
                               "cuCtxSynchronize", "cuModuleLoadDataEx", "cuEventSynchronize"};
  std::vector<int64_t> before;
  for (const char* name : never) before.push_back(stub().calls(name));
  for (int i = 0; i < 3; ++i) plan.execute(d.backward, workspace.get(), workspace.bytes());
  for (size_t i = 0; i < std::size(never); ++i) EXPECT_EQ(stub().calls(never[i]), before[i]) << never[i];
}

TEST_F(CudaBackend, UnalignedPointersGetAKernelOfTheirOwn) {
  const OnDevice d;
  forward(d.forward);
  const int64_t loaded = stub().alive("modules");
  ForwardTensors t = d.forward;
  t.q = t.q.on(Device::kCuda, 0, static_cast<char*>(t.q.data()) + 2);
  forward(t);
  EXPECT_EQ(stub().alive("modules"), loaded + 1);
  EXPECT_EQ(last.q, t.q.data());
  forward(t);
  forward(d.forward);
  EXPECT_EQ(stub().alive("modules"), loaded + 1);
  EXPECT_EQ(launched, (std::vector<std::string>{"3", "f", "f", "3"}));
  Options options;
  options.algorithm = Algorithm::kV3;
  expect_contains(error_thrown_by([&] { forward(t, options); }), "no multiple of 16 bytes, and algorithm v3 was asked for");
}

TEST_F(CudaBackend, V3BackwardLaunchesThreeKernels) {
  const OnDevice d;
  const int64_t early = stub().alive("early launches");
  backward(d.backward);
  EXPECT_EQ(launched, (std::vector<std::string>{"P", "B", "E"}));
  launched.clear();
  Options options;
  options.algorithm = Algorithm::kV3;
  for (const bool deterministic : {false, true}) {
    options.deterministic = deterministic;
    backward(d.backward, options);
    EXPECT_EQ(last.dq, d.backward.dq.data());
    EXPECT_EQ(last.dq_semaphore != nullptr, deterministic);
    EXPECT_EQ(Plan(d.backward, options).info().algorithm, FATTN_ALGORITHM_V3);
  }
  EXPECT_EQ(launched, (std::vector<std::string>{"P", "B", "E", "P", "B", "E"}));
  EXPECT_EQ(stub().alive("early launches"), early + 6);  // all but the first of each three
  // Pointers that TMA does not take.
  BackwardTensors t = d.backward;
  t.dv = t.dv.on(Device::kCuda, 0, static_cast<char*>(t.dv.data()) + 2);
  expect_contains(error_thrown_by([&] { backward(t, options); }), "no multiple of 16 bytes, and algorithm v3 was asked for");
  // Too few registers for what its warps take.
  stub().set("registers", 88);
  const Tensor x = Tensor(nullptr, DType::kF16, {1, 64, 2, 128}).on(Device::kCuda, 0, nullptr);  // of no other test: kernels are kept
  cuda::Buffer memory(0, static_cast<size_t>(x.size()) * 2 * 8);
  const auto part = [&](int i) { return x.on(Device::kCuda, 0, static_cast<char*>(memory.get()) + i * x.size() * 2); };
  cuda::Buffer sums(0, 4 * 64 * 2);
  const Tensor lse = Tensor(nullptr, DType::kF32, {1, 2, 64}).on(Device::kCuda, 0, sums.get());
  options.deterministic = false;
  expect_contains(error_thrown_by([&] {
                    backward({part(0), part(1), part(2), part(3), lse, part(4), part(5), part(6), part(7)}, options);
                  }),
                  "internal: fattn_v3_bwd has 88 registers");
}

// One CTA a head, forward; backward v2's kernels before and after, and between them one CTA for all keys of a key head.
TEST_F(CudaBackend, V1LaunchesItsKernels) {
  const OnDevice d;
  Options options;
  options.algorithm = Algorithm::kV1;
  options.causal = true;
  forward(d.forward, options);
  backward(d.backward, options);
  EXPECT_EQ(launched, (std::vector<std::string>{"1", "p", "o", "e"}));
  EXPECT_EQ(last.heads_per_section, 1);
  EXPECT_EQ(last.dq_semaphore, nullptr);
  const Plan forward_plan(d.forward, options);
  EXPECT_EQ(forward_plan.info().algorithm, FATTN_ALGORITHM_V1);
  EXPECT_EQ(forward_plan.workspace_bytes(), 0u) << "100 keys are one block: nothing is kept from one to the next";
  const auto tensor = [](int64_t seqlen) { return Tensor(nullptr, DType::kBF16, {1, seqlen, 2, 40}).on(Device::kCuda, 0, nullptr); };
  const Plan longer(ForwardTensors{tensor(33), tensor(129), tensor(129), tensor(33), {}, {}}, options);
  EXPECT_EQ(longer.workspace_bytes(), 2u * 48 * (48 + 2) * 4) << "o of 48 rows and columns, m and l, in fp32";
  const auto reason = [&](DType dtype, int64_t headdim) {
    const Tensor x = Tensor(nullptr, dtype, {1, 64, 2, headdim}).on(Device::kCuda, 0, nullptr);
    return supported(describe(ForwardTensors{x, x, x, x, {}, {}}, options)).reason;
  };
  EXPECT_EQ(reason(DType::kF16, 128), "");
  expect_contains(reason(DType::kF32, 64), "algorithm v1 take fp16 and bf16");
  expect_contains(reason(DType::kF16, 136), "algorithm v1 take up to 128");
  options.softcap = 10;
  expect_contains(reason(DType::kF16, 64), "algorithm v1 of backend cuda does not compute softcap");
}

// What v3 does not take goes to v2, and the plan says why; unless v3 was asked for.
TEST_F(CudaBackend, WhatV3DoesNotTakeIsComputedByV2) {
  const OnDevice d;
  ForwardTensors t = d.forward;
  const Tensor k = Tensor(nullptr, DType::kBF16, {OnDevice::kBatch, OnDevice::kSeqlen, OnDevice::kHeadsK, 36}).on(Device::kCuda, 0, t.k.data());
  const Tensor q = Tensor(nullptr, DType::kBF16, {OnDevice::kBatch, OnDevice::kSeqlen, OnDevice::kHeads, 36}).on(Device::kCuda, 0, t.q.data());
  t.q = q, t.k = k;  // rows of 72 bytes
  forward(t);
  EXPECT_EQ(launched, std::vector<std::string>{"f"});
  const Plan plan(t, {});  // owns the text
  EXPECT_EQ(plan.info().algorithm, FATTN_ALGORITHM_V2);
  expect_contains(plan.info().why, "not v3: q has a stride of");
  Options options;
  options.algorithm = Algorithm::kV3;
  expect_contains(error_thrown_by([&] { forward(t, options); }), "unsupported: backend cuda: algorithm v3 was asked for: q has a stride of");
  BackwardTensors back = d.backward;
  const Tensor dk = Tensor(nullptr, DType::kBF16, {OnDevice::kBatch, OnDevice::kSeqlen, OnDevice::kHeadsK, 36}).on(Device::kCuda, 0, back.dk.data());
  back.q = back.dq = q, back.k = k, back.dk = dk;
  expect_contains(error_thrown_by([&] { backward(back, options); }), "algorithm v3 was asked for: headdim is 36 and headdim_v 64");
}

// Its warps take more registers than the launch would give: they would wait for each other for ever.
TEST_F(CudaBackend, V3KernelsWithTooFewRegistersAreNotLaunched) {
  stub().set("registers", 88);
  const Tensor x = Tensor(nullptr, DType::kF16, {1, 64, 2, 128}).on(Device::kCuda, 0, nullptr);  // of no other test: kernels are kept
  cuda::Buffer memory(0, static_cast<size_t>(x.size()) * 2);
  const Tensor t = x.on(Device::kCuda, 0, memory.get());
  cuda::Buffer out(0, memory.bytes());
  Options options;
  options.algorithm = Algorithm::kV3;
  expect_contains(error_thrown_by([&] {
                    forward({t, t, t, x.on(Device::kCuda, 0, out.get()), {}, {}}, options);
                  }),
                  "internal: fattn_v3_fwd has 88 registers");
  EXPECT_TRUE(launched.empty());
}

TEST_F(CudaBackend, UnsupportedSaysWhy) {
  const auto reason = [](DType dtype, int64_t headdim, Options options = {}) {
    const Tensor x = Tensor(nullptr, dtype, {1, 64, 2, headdim}).on(Device::kCuda, 0, nullptr);
    return supported(describe(ForwardTensors{x, x, x, x, {}, {}}, options)).reason;
  };
  EXPECT_EQ(reason(DType::kBF16, 256), "");
  EXPECT_EQ(reason(DType::kF32, 64), "");
  expect_contains(reason(DType::kF64, 64), "fp32, fp16 and bf16");
  expect_contains(reason(DType::kBF16, 264), "up to 256");
  Options options;
  options.cuda_level = 75;
  EXPECT_EQ(reason(DType::kF16, 64, options), "");
  expect_contains(reason(DType::kBF16, 64, options), "bf16 needs compute capability 8.0");
  expect_contains(reason(DType::kF32, 64, options), "fp32 needs compute capability 8.0");
}

// Asking compiles nothing.
TEST_F(CudaBackend, SupportedLoadsNothing) {
  const int64_t loaded = stub().alive("modules");
  const Tensor x = Tensor(nullptr, DType::kF16, {1, 64, 2, 72}).on(Device::kCuda, 0, nullptr);
  EXPECT_TRUE(supported(describe(ForwardTensors{x, x, x, x, {}, {}}, {})));
  EXPECT_EQ(stub().alive("modules"), loaded);
}

TEST_F(CudaBackend, ErrorsLeaveItUsable) {
  const OnDevice d;
  forward(d.forward);
  std::vector<uint16_t> host(1 << 16);
  ForwardTensors t = d.forward;
  t.v = t.v.on(Device::kCuda, 0, host.data());
  expect_contains(error_thrown_by([&] { forward(t); }), "invalid_argument: v");
  stub().fault("cuLaunchKernel", 701, 1);  // too many resources requested
  expect_contains(error_thrown_by([&] { forward(d.forward); }), "fattn_v3_fwd");
  stub().fault("cuMemAlloc_v2", 2, 1);
  expect_contains(error_thrown_by([&] { backward(d.backward); }), "out_of_memory");
  const Plan plan(d.backward, {});
  cuda::Buffer workspace(0, plan.workspace_bytes() + 256);
  char* const at = static_cast<char*>(workspace.get());
  expect_contains(error_thrown_by([&] { plan.execute(d.backward, at + 64, plan.workspace_bytes()); }), "aligned to 256");
  expect_contains(error_thrown_by([&] { plan.execute(d.backward, at, plan.workspace_bytes() - 1); }), "workspace");
  launched.clear();
  forward(d.forward);
  plan.execute(d.backward, at, plan.workspace_bytes());
  EXPECT_EQ(launched.size(), 4u);
}

TEST_F(CudaBackend, EmptyProblemsLaunchWhatIsLeftToWrite) {
  const auto q = [](int64_t seqlen, void* data) { return Tensor(nullptr, DType::kBF16, {1, seqlen, 2, 64}).on(Device::kCuda, 0, data); };
  cuda::Buffer memory(0, 1 << 20);
  char* const at = static_cast<char*>(memory.get());
  forward({q(0, nullptr), q(5, at), q(5, at + 4096), q(0, nullptr), {}, {}});
  EXPECT_TRUE(launched.empty());
  forward({q(5, at), q(0, nullptr), q(0, nullptr), q(5, at + 4096), {}, {}});  // o is zeros
  EXPECT_EQ(launched.size(), 1u);
}

}  // namespace
}  // namespace fattn
