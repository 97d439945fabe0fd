// From the public API to the launch, with stubs of driver and NVRTC: which kernels are launched with what, errors on the way,
// what is allocated. What the kernels compute is for a real GPU (test_cuda_gpu, `fattn check --device cuda`).
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "fattn/attention.hpp"
#include "fattn/device.hpp"
#include "fattn/plan.hpp"
#include "jit_test.h"
#include "plan/plan.h"
#include "shared/attention_params.h"
#include "shared/sequence_rest_params.h"
#include "stub/cuda_stub.h"

namespace fattn {
namespace {

using test::CudaStub;
using test::expect_contains;

const bool stubs_are_set = test::use_stubs(FATTN_STUB_CUDA_PATH);

const CudaStub& stub() {
  static const CudaStub loaded(FATTN_STUB_CUDA_PATH);
  return loaded;
}

// What the last launch of a kernel was given, and in which order kernels were launched.
AttentionParams last;
std::vector<std::string> launched;
PairParams last_pairs;  // of kernels that have features of pairs
void note_pairs(const void* argument) {
  std::memcpy(static_cast<void*>(&last_pairs), argument, sizeof last_pairs);
  launched.emplace_back("pairs");
}
SequenceRestParams last_rest;
void note_rest(const void* argument) {
  std::memcpy(static_cast<void*>(&last_rest), argument, sizeof last_rest);
  launched.emplace_back("rest");
}
template <char kWhich>
void note(const void* argument) {
  std::memcpy(&last, argument, sizeof last);
  launched.emplace_back(1, kWhich);
}

// A problem in the memory of the stub's device.
struct OnDevice {
  static constexpr int64_t kBatch = 2, kSeqlen = 100, kHeads = 4, kHeadsK = 2, kHeaddim = 64;
  cuda::Buffer memory[9];
  ForwardTensors forward;
  BackwardTensors backward;

  explicit OnDevice(DType dtype = DType::kBF16) {
    int next = 0;
    const auto make = [&](DType type, std::initializer_list<int64_t> shape) {
      const Tensor t(nullptr, type, shape);
      cuda::Buffer& buffer = memory[next++] = cuda::Buffer(0, static_cast<size_t>(t.size()) * size_of(type) + 64);
      return t.on(Device::kCuda, 0, buffer.get());
    };
    const auto q = [&] { return make(dtype, {kBatch, kSeqlen, kHeads, kHeaddim}); };
    const auto k = [&] { return make(dtype, {kBatch, kSeqlen, kHeadsK, kHeaddim}); };
    forward = {q(), k(), k(), q(), make(DType::kF32, {kBatch, kHeads, kSeqlen}), {}};
    const Tensor dout = q(), dq = q(), dk = k(), dv = k();
    backward = {forward.q, forward.k, forward.v, forward.o, forward.lse, dout, dq, dk, dv};
  }
};

class CudaBackend : public ::testing::Test {
 protected:
  void SetUp() override {
    stub().set("registers", 168);  // of every kernel; no less than the warps of v3 count on
    stub().kernel("fattn_v2_fwd", note<'f'>, sizeof last);
    stub().kernel("fattn_v3_fwd", note<'3'>, sizeof last);
    stub().kernel("fattn_v3_fwd_f32", note<'W'>, sizeof last);
    stub().kernel("fattn_v3_f32_split", note<'s'>, sizeof last);
    stub().kernel("fattn_v2_bwd_f32_prepare", note<'p'>, sizeof last);
    stub().kernel("fattn_v2_bwd_f32_split", note<'S'>, sizeof last);
    stub().kernel("fattn_v2_bwd_f32", note<'b'>, sizeof last);
    stub().kernel("fattn_v2_bwd_f32_finish", note<'e'>, sizeof last);
    stub().kernel("fattn_decode", note<'d'>, sizeof last);
    stub().kernel("fattn_decode_combine", note<'c'>, sizeof last);
    stub().kernel("fattn_v2_bwd_prepare", note<'p'>, sizeof last);
    stub().kernel("fattn_v2_bwd", note<'b'>, sizeof last);
    stub().kernel("fattn_v2_bwd_finish", note<'e'>, sizeof last);
    stub().kernel("fattn_v1_fwd", note<'1'>, sizeof last);
    stub().kernel("fattn_v1_bwd", note<'o'>, sizeof last);
    stub().kernel("fattn_v3_bwd_prepare", note<'P'>, sizeof last);
    stub().kernel("fattn_v3_bwd", note<'B'>, sizeof last);
    stub().kernel("fattn_v3_bwd_finish", note<'E'>, sizeof last);
    stub().kernel("fattn_v2_dbias_zero", note<'z'>, sizeof last);
    stub().kernel("fattn_v2_dbias_finish", note<'Z'>, sizeof last);
    launched.clear();
  }
  const test::CacheFolder folder_;
};

std::string error_of(const std::function<void()>& body) {
  try {
    body();
    return "no error";
  } catch (const Error& e) {
    return std::string(fattn_status_name(static_cast<fattn_status>(e.code()))) + ": " + e.what();
  }
}

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
  EXPECT_EQ(plan.workspace_bytes(), 2 * kBlocks * (64 * 64 * 4 + 16));
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
  expect_contains(error_of([&] { Plan(d.forward, options); }), "algorithm v3 has no softcap in fp32");
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
  expect_contains(error_of([&] { plan.execute(t, at, plan.workspace_bytes()); }), "workspace");

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
  expect_contains(error_of([&] { forward(t); }), "seqused_k");
}

// What depends on pairs: pointers and strides reach the kernels, dbias is made 0 before and, in 16 bits, written behind them.
TEST_F(CudaBackend, FeaturesOfPairsReachTheKernels) {
  stub().kernel("fattn_v2_fwd", note_pairs, sizeof last_pairs);
  stub().kernel("fattn_v2_bwd", note_pairs, sizeof last_pairs);
  OnDevice d;
  constexpr int64_t kBatch = OnDevice::kBatch, kHeads = OnDevice::kHeads, kSeqlen = OnDevice::kSeqlen;
  cuda::Buffer memory(0, 1 << 20);
  const auto at = [&](DType dtype, std::initializer_list<int64_t> shape, int64_t offset) {
    return Tensor(nullptr, dtype, shape).on(Device::kCuda, 0, static_cast<char*>(memory.get()) + offset);
  };
  ScoreTensors& scores = d.forward.scores;
  scores.seqused_k = at(DType::kI32, {kBatch}, 0);
  scores.alibi_slopes = at(DType::kF32, {kBatch, kHeads}, 64);
  scores.bias = at(DType::kF32, {1, kHeads, kSeqlen, kSeqlen}, 1024);
  scores.mask = at(DType::kU8, {kBatch, 1, 1, kSeqlen}, 512);
  scores.dropout_state = at(DType::kI64, {2}, 256);
  Options options;
  options.p_dropout = 0.25;
  forward(d.forward, options);
  EXPECT_EQ(launched, std::vector<std::string>{"pairs"});
  EXPECT_EQ(last_pairs.q, d.forward.q.data());
  EXPECT_EQ(last_pairs.lengths, scores.seqused_k.data());
  EXPECT_EQ(last_pairs.alibi_slopes, scores.alibi_slopes.data());
  EXPECT_EQ(last_pairs.alibi_batch_stride, kHeads);
  EXPECT_EQ(last_pairs.bias, scores.bias.data());
  EXPECT_EQ(last_pairs.bias_strides.batch, 0) << "one for all";
  EXPECT_EQ(last_pairs.bias_strides.head, kSeqlen * kSeqlen);
  EXPECT_EQ(last_pairs.bias_strides.row, kSeqlen);
  EXPECT_EQ(last_pairs.pair_mask, scores.mask.data());
  EXPECT_EQ(last_pairs.pair_mask_strides.batch, kSeqlen);
  EXPECT_EQ(last_pairs.pair_mask_strides.row, 0);
  EXPECT_EQ(last_pairs.dropout_state, scores.dropout_state.data());
  EXPECT_EQ(last_pairs.dropout_below, 16384u);
  EXPECT_FLOAT_EQ(last_pairs.dropout_scale, 4.0f / 3);
  const Plan plan(d.forward, options);
  expect_contains(plan.info().kernel, "cuda v2 forward bf16");
  expect_contains(plan.info().why, "not v3: algorithm v3 of backend cuda does not compute a bias");

  d.backward.scores = scores;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    launched.clear();
    d.backward.dbias = at(dtype, {1, kHeads, kSeqlen, kSeqlen}, 1 << 19);
    backward(d.backward, options);
    EXPECT_EQ(launched.front(), "z");
    EXPECT_EQ(launched[2], "pairs");
    EXPECT_EQ(launched.back(), dtype == DType::kF32 ? "e" : "Z");
    EXPECT_EQ(last_pairs.dbias_out, d.backward.dbias.data());
    EXPECT_EQ(last_pairs.dbias == last_pairs.dbias_out, dtype == DType::kF32);
    EXPECT_EQ(last_pairs.dbias_strides.batch, 0);
    EXPECT_EQ(last_pairs.dbias_strides.head, kSeqlen * kSeqlen);
    EXPECT_EQ(last_pairs.dbias_alone, 0) << "both batch entries add to it";
  }
  options.deterministic = true;
  expect_contains(error_of([&] { backward(d.backward, options); }), "atomic");
  options.deterministic = false;
  options.softcap = 3;
  expect_contains(error_of([&] { backward(d.backward, options); }), "no dbias with softcap");
}

// Packed sequences: offsets, totals and ids reach the kernels, and behind them rows of no sequence are written.
TEST_F(CudaBackend, PackedSequencesReachTheKernels) {
  stub().kernel("fattn_v2_fwd", note_pairs, sizeof last_pairs);
  stub().kernel("fattn_v2_bwd", note_pairs, sizeof last_pairs);
  stub().kernel("fattn_v2_bwd_prepare", note_pairs, sizeof last_pairs);
  stub().kernel("fattn_sequence_rest", note_rest, sizeof last_rest);
  OnDevice d;
  constexpr int64_t kTotal = OnDevice::kBatch * OnDevice::kSeqlen, kHeads = OnDevice::kHeads, kHeadsK = OnDevice::kHeadsK,
                    kHeaddim = OnDevice::kHeaddim;
  cuda::Buffer memory(0, 1 << 16);
  const auto ints = [&](int64_t count, int64_t offset) {
    return Tensor(nullptr, DType::kI32, {count}).on(Device::kCuda, 0, static_cast<char*>(memory.get()) + offset);
  };
  const auto pack = [](Tensor& t, int64_t heads) { t = Tensor(nullptr, t.dtype(), {kTotal, heads, kHeaddim}).on(Device::kCuda, 0, t.data()); };
  BackwardTensors& b = d.backward;
  for (Tensor* t : {&b.q, &b.o, &b.dout, &b.dq}) pack(*t, kHeads);
  for (Tensor* t : {&b.k, &b.v, &b.dk, &b.dv}) pack(*t, kHeadsK);
  b.lse = b.dlse = Tensor(nullptr, DType::kF32, {kHeads, kTotal}).on(Device::kCuda, 0, b.lse.data());
  b.scores.cu_seqlens_q = ints(4, 0);
  b.scores.cu_seqlens_k = ints(4, 64);
  b.scores.document_q = ints(kTotal, 4096);
  b.scores.document_k = ints(kTotal, 8192);
  Options options;
  options.max_seqlen_q = 70;
  options.max_seqlen_k = 80;
  const ForwardTensors t{b.q, b.k, b.v, b.o, b.lse, {}, b.scores};
  options.algorithm = Algorithm::kV2;
  forward(t, options);
  options.algorithm = Algorithm::kAuto;
  EXPECT_EQ(launched, (std::vector<std::string>{"pairs", "rest"}));
  EXPECT_EQ(last_pairs.batch, 3);
  EXPECT_EQ(last_pairs.seqlen_q, 70);
  EXPECT_EQ(last_pairs.seqlen_k, 80);
  EXPECT_EQ(last_pairs.total_q, kTotal);
  EXPECT_EQ(last_pairs.total_k, kTotal);
  EXPECT_EQ(last_pairs.q_strides.batch, 0);
  EXPECT_EQ(last_pairs.lse_strides.head, kTotal);
  EXPECT_EQ(last_pairs.cu_seqlens_q, b.scores.cu_seqlens_q.data());
  EXPECT_EQ(last_pairs.cu_seqlens_k, b.scores.cu_seqlens_k.data());
  EXPECT_EQ(last_pairs.cu_seqlens_k_stride, 1);
  EXPECT_EQ(last_pairs.document_q, b.scores.document_q.data());
  EXPECT_EQ(last_pairs.document_k, b.scores.document_k.data());
  EXPECT_EQ(last_rest.batch, 3);
  EXPECT_EQ(last_rest.parts[0].offsets, b.scores.cu_seqlens_q.data());
  EXPECT_EQ(last_rest.parts[0].outputs[0].to, b.o.data());
  EXPECT_EQ(last_rest.parts[0].outputs[0].columns, kHeaddim);
  EXPECT_EQ(last_rest.parts[0].most, 70);
  EXPECT_EQ(last_rest.parts[0].lse, b.lse.data());
  EXPECT_EQ(last_rest.parts[1].total, kTotal);
  EXPECT_EQ(last_rest.parts[1].outputs[0].to, nullptr);

  // Algorithm v3 has a list of tiles in the workspace, and behind it what the documents leave them.
  stub().kernel("fattn_v3_packed_tiles", note_pairs, sizeof last_pairs);
  stub().kernel("fattn_v3_document_ranges", note_pairs, sizeof last_pairs);
  const Plan divided(t, options);
  expect_contains(divided.info().kernel, "cuda v3 forward bf16");
  cuda::Buffer for_documents(0, divided.workspace_bytes());
  launched.clear();
  last_pairs = {};
  divided.execute(t, for_documents.get(), for_documents.bytes(), nullptr);
  EXPECT_EQ(launched, (std::vector<std::string>{"pairs", "pairs", "3", "rest"}));
  EXPECT_EQ(last_pairs.tiles, for_documents.get());
  EXPECT_EQ(last_pairs.document_q, b.scores.document_q.data());

  // Without documents the list alone.
  ForwardTensors undivided = t;
  undivided.scores.document_q = undivided.scores.document_k = {};
  const Plan v3(undivided, options);
  expect_contains(v3.info().kernel, "cuda v3 forward bf16");
  cuda::Buffer workspace(0, v3.workspace_bytes());
  EXPECT_EQ(v3.workspace_bytes(), 16 + 32 * (static_cast<size_t>(kTotal) / 128 + 3));
  launched.clear();
  last_pairs = {};
  v3.execute(undivided, workspace.get(), workspace.bytes(), nullptr);
  EXPECT_EQ(launched, (std::vector<std::string>{"pairs", "3", "rest"}));
  EXPECT_EQ(last_pairs.tiles, workspace.get());
  EXPECT_EQ(last_pairs.cu_seqlens_q, b.scores.cu_seqlens_q.data());
  EXPECT_EQ(last_rest.lengths, nullptr);

  // With lengths likewise, of which the list and the kernel behind the pass are told.
  undivided.scores.seqused_k = ints(3, 128);
  const Plan v3_lengths(undivided, options);
  expect_contains(v3_lengths.info().kernel, "cuda v3 forward bf16");
  launched.clear();
  last_pairs = {};
  v3_lengths.execute(undivided, workspace.get(), workspace.bytes(), nullptr);
  EXPECT_EQ(launched, (std::vector<std::string>{"pairs", "3", "rest"}));
  EXPECT_EQ(last_pairs.lengths, undivided.scores.seqused_k.data());
  EXPECT_EQ(last_pairs.length_stride, 1);
  EXPECT_EQ(last_rest.lengths, undivided.scores.seqused_k.data());
  EXPECT_EQ(last_rest.length_stride, 1);

  launched.clear();
  last_pairs = {};
  backward(b, options);
  EXPECT_EQ(launched, (std::vector<std::string>{"pairs", "pairs", "e", "rest"}));
  EXPECT_EQ(last_pairs.dlse, b.dlse.data());
  EXPECT_EQ(last_pairs.dlse_strides.head, kTotal);
  EXPECT_EQ(last_rest.parts[0].outputs[0].to, b.dq.data());
  EXPECT_EQ(last_rest.parts[0].lse, nullptr) << "backward it is an input";
  EXPECT_EQ(last_rest.parts[1].outputs[0].to, b.dk.data());
  EXPECT_EQ(last_rest.parts[1].outputs[1].to, b.dv.data());
  EXPECT_EQ(last_rest.parts[1].heads, kHeadsK);

  // Without documents it is v3's too, behind a list of tiles of keys.
  stub().kernel("fattn_v3_packed_key_tiles", note_pairs, sizeof last_pairs);
  stub().kernel("fattn_v3_bwd_prepare", note_pairs, sizeof last_pairs);
  BackwardTensors whole = b;
  whole.scores.document_q = whole.scores.document_k = {};
  const Plan v3_backward(whole, options);
  expect_contains(v3_backward.info().kernel, "cuda v3 backward bf16");
  cuda::Buffer more(0, v3_backward.workspace_bytes());
  launched.clear();
  last_pairs = {};
  v3_backward.execute(whole, more.get(), more.bytes(), nullptr);
  EXPECT_EQ(launched, (std::vector<std::string>{"pairs", "pairs", "B", "E", "rest"}));
  const int64_t rows = kHeads * (kTotal / 64 + 3) * 64;
  EXPECT_EQ(last_pairs.tiles, static_cast<char*>(more.get()) + rows * (kHeaddim + 2) * 4);
  EXPECT_EQ(last_pairs.cu_seqlens_k, b.scores.cu_seqlens_k.data());
  EXPECT_EQ(last_pairs.dlse, b.dlse.data());
  whole.scores.seqused_k = ints(3, 128);
  const Plan with_lengths(whole, options);
  expect_contains(with_lengths.info().kernel, "cuda v3 backward bf16");
  cuda::Buffer most(0, with_lengths.workspace_bytes());
  EXPECT_EQ(with_lengths.workspace_bytes(), v3_backward.workspace_bytes() + 32 * 3) << "room for the tiles of keys that are not used";
  launched.clear();
  with_lengths.execute(whole, most.get(), most.bytes(), nullptr);
  EXPECT_EQ(launched, (std::vector<std::string>{"pairs", "pairs", "B", "E", "rest"}));
  EXPECT_EQ(last_rest.lengths, whole.scores.seqused_k.data());

  options.algorithm = Algorithm::kV1;
  expect_contains(error_of([&] { backward(b, options); }), "does not compute packed sequences");
  options.algorithm = Algorithm::kAuto;
  int32_t host[4] = {};
  b.scores.cu_seqlens_k = b.scores.cu_seqlens_k.on(Device::kCuda, 0, host);
  expect_contains(error_of([&] { backward(b, options); }), "cu_seqlens_k");
}

// Documents: a kernel before algorithm v3's passes finds in the workspace what each 64 queries, or keys, see.
TEST_F(CudaBackend, DocumentsReachTheKernelsOfBothPasses) {
  stub().kernel("fattn_v3_document_ranges", note_pairs, sizeof last_pairs);
  OnDevice d;
  cuda::Buffer memory(0, 1 << 16);
  const auto ids = [&](int64_t offset) {
    return Tensor(nullptr, DType::kI32, {OnDevice::kBatch, OnDevice::kSeqlen}).on(Device::kCuda, 0, static_cast<char*>(memory.get()) + offset);
  };
  ForwardTensors& t = d.forward;
  t.scores.document_q = ids(4096);
  t.scores.document_k = ids(8192);
  const Plan plan(t, {});
  expect_contains(plan.info().kernel, "cuda v3 forward bf16");
  // Two tiles of 64 queries, and keys up to a whole block of 128.
  EXPECT_GE(plan.workspace_bytes(), OnDevice::kBatch * (2 * 16 + 128 * 4));
  cuda::Buffer workspace(0, plan.workspace_bytes());
  launched.clear();
  last_pairs = {};
  plan.execute(t, workspace.get(), workspace.bytes(), nullptr);
  EXPECT_EQ(launched, (std::vector<std::string>{"pairs", "3"}));
  EXPECT_EQ(last_pairs.tiles, workspace.get());
  EXPECT_EQ(last_pairs.document_q, t.scores.document_q.data());
  EXPECT_EQ(last_pairs.document_k, t.scores.document_k.data());
  EXPECT_EQ(last_pairs.document_q_stride, OnDevice::kSeqlen);
  EXPECT_EQ(last_pairs.seqlen_k, OnDevice::kSeqlen);

  // Backward it comes second: it waits for the kernel before, and the next one for both.
  stub().kernel("fattn_v3_bwd_prepare", note_pairs, sizeof last_pairs);
  d.backward.scores = t.scores;
  const Plan backward(d.backward, {});
  expect_contains(backward.info().kernel, "cuda v3 backward bf16");
  cuda::Buffer more(0, backward.workspace_bytes());
  launched.clear();
  last_pairs = {};
  backward.execute(d.backward, more.get(), more.bytes(), nullptr);
  EXPECT_EQ(launched, (std::vector<std::string>{"pairs", "pairs", "B", "E"}));
  const int64_t rows = OnDevice::kBatch * OnDevice::kHeads * ((OnDevice::kSeqlen + 63) / 64) * 64;
  EXPECT_EQ(last_pairs.tiles, static_cast<char*>(more.get()) + rows * (OnDevice::kHeaddim + 2) * 4);
  EXPECT_EQ(last_pairs.document_k, t.scores.document_k.data());
}

// Packed tensors of which no row belongs to a sequence: all of them are written, and nothing else is launched.
TEST_F(CudaBackend, PackedTensorsWithoutSequencesAreWritten) {
  stub().kernel("fattn_v3_packed_tiles", note_pairs, sizeof last_pairs);
  stub().kernel("fattn_sequence_rest", note_rest, sizeof last_rest);
  OnDevice d;
  BackwardTensors& b = d.backward;
  const auto pack = [&](DType dtype) {
    for (Tensor* t : {&b.q, &b.o, &b.dout, &b.dq, &b.k, &b.v, &b.dk, &b.dv}) *t = Tensor(nullptr, dtype, {7, 2, 64}).on(Device::kCuda, 0, t->data());
  };
  b.lse = Tensor(nullptr, DType::kF32, {2, 7}).on(Device::kCuda, 0, b.lse.data());
  b.scores.cu_seqlens_q = b.scores.cu_seqlens_k = Tensor(nullptr, DType::kI32, {1}).on(Device::kCuda, 0, d.memory[0].get());
  Options options;
  for (const auto& [algorithm, dtype] : {std::pair{Algorithm::kAuto, DType::kBF16}, {Algorithm::kV2, DType::kBF16}, {Algorithm::kAuto, DType::kF32}})
    for (const int64_t most : {0, 7}) {
      pack(dtype);
      const int words = dtype == DType::kF32 ? 2 : 1;  // of 16 bits
      options.algorithm = algorithm;
      options.max_seqlen_q = options.max_seqlen_k = most;
      launched.clear();
      forward({b.q, b.k, b.v, b.o, b.lse, {}, b.scores}, options);
      EXPECT_EQ(launched, std::vector<std::string>{"rest"});
      EXPECT_EQ(last_rest.batch, 0);
      EXPECT_EQ(last_rest.parts[0].total, 7);
      EXPECT_EQ(last_rest.parts[0].outputs[0].columns, words * 64);
      EXPECT_EQ(last_rest.parts[0].outputs[0].head_stride, words * 64);
      EXPECT_EQ(last_rest.parts[0].outputs[0].row_stride, words * 128);
      launched.clear();
      backward(b, options);
      EXPECT_EQ(launched, std::vector<std::string>{"rest"});
      EXPECT_EQ(last_rest.parts[1].total, 7);
      EXPECT_EQ(last_rest.parts[1].outputs[1].columns, words * 64);
    }
}

// The gradient of lse is the first kernel's business, in every algorithm that has it; the others' specialisations do not know of it.
TEST_F(CudaBackend, TheGradientOfLseReachesTheFirstKernel) {
  stub().kernel("fattn_v2_bwd_prepare", note_pairs, sizeof last_pairs);
  stub().kernel("fattn_v3_bwd_prepare", note_pairs, sizeof last_pairs);
  OnDevice d;
  d.backward.dlse = d.backward.lse;
  Options options;
  for (const auto& [algorithm, kernels] : {std::pair{Algorithm::kV1, std::vector<std::string>{"pairs", "o", "e"}},
                                           {Algorithm::kV2, {"pairs", "b", "e"}},
                                           {Algorithm::kV3, {"pairs", "B", "E"}}}) {
    launched.clear();
    last_pairs = {};
    options.algorithm = algorithm;
    backward(d.backward, options);
    EXPECT_EQ(launched, kernels);
    EXPECT_EQ(last_pairs.dlse, d.backward.dlse.data());
    EXPECT_EQ(last_pairs.dlse_strides.row, 1);
  }
  options.algorithm = Algorithm::kStandard;
  expect_contains(error_of([&] { backward(d.backward, options); }), "the gradient of lse");
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
  expect_contains(error_of([&] { forward(t, options); }), "no multiple of 16 bytes, and algorithm v3 was asked for");
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
  expect_contains(error_of([&] { backward(t, options); }), "no multiple of 16 bytes, and algorithm v3 was asked for");
  // Too few registers for what its warps take.
  stub().set("registers", 88);
  const Tensor x = Tensor(nullptr, DType::kF16, {1, 64, 2, 128}).on(Device::kCuda, 0, nullptr);  // of no other test: kernels are kept
  cuda::Buffer memory(0, static_cast<size_t>(x.size()) * 2 * 8);
  const auto part = [&](int i) { return x.on(Device::kCuda, 0, static_cast<char*>(memory.get()) + i * x.size() * 2); };
  cuda::Buffer sums(0, 4 * 64 * 2);
  const Tensor lse = Tensor(nullptr, DType::kF32, {1, 2, 64}).on(Device::kCuda, 0, sums.get());
  options.deterministic = false;
  expect_contains(error_of([&] {
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
  expect_contains(error_of([&] { forward(t, options); }), "unsupported: backend cuda: algorithm v3 was asked for: q has a stride of");
  BackwardTensors back = d.backward;
  const Tensor dk = Tensor(nullptr, DType::kBF16, {OnDevice::kBatch, OnDevice::kSeqlen, OnDevice::kHeadsK, 36}).on(Device::kCuda, 0, back.dk.data());
  back.q = back.dq = q, back.k = k, back.dk = dk;
  expect_contains(error_of([&] { backward(back, options); }), "algorithm v3 was asked for: headdim is 36 and headdim_v 64");
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
  expect_contains(error_of([&] {
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
  expect_contains(error_of([&] { forward(t); }), "invalid_argument: v");
  stub().fault("cuLaunchKernel", 701, 1);  // too many resources requested
  expect_contains(error_of([&] { forward(d.forward); }), "fattn_v3_fwd");
  stub().fault("cuMemAlloc_v2", 2, 1);
  expect_contains(error_of([&] { backward(d.backward); }), "out_of_memory");
  const Plan plan(d.backward, {});
  cuda::Buffer workspace(0, plan.workspace_bytes() + 256);
  char* const at = static_cast<char*>(workspace.get());
  expect_contains(error_of([&] { plan.execute(d.backward, at + 64, plan.workspace_bytes()); }), "aligned to 256");
  expect_contains(error_of([&] { plan.execute(d.backward, at, plan.workspace_bytes() - 1); }), "workspace");
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
