// As test_cuda_backend.cpp, of what a problem has beside q, k and v: bias, masks, dropout, packed sequences, documents, the gradient of lse.
#include <gtest/gtest.h>
#include <algorithm>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cuda_backend.h"
#include "device_abi/sinks_gradient_params.h"
#include "fattn/attention.hpp"
#include "fattn/device.hpp"
#include "fattn/plan.hpp"
#include "stub/cuda_stub.h"

namespace fattn {
namespace {

using test::expect_contains;
using namespace test::launches;

// Runs the plan in a workspace of its own, which is returned; `launched` and last_pairs are of this call alone.
template <class Tensors>
cuda::Buffer execute(const Plan& plan, const Tensors& tensors) {
  cuda::Buffer workspace(0, plan.workspace_bytes());
  launched.clear();
  last_pairs = {};
  plan.execute(tensors, workspace.get(), workspace.bytes(), nullptr);
  return workspace;
}

// Of v3's backward pass: behind dq, lse and row sums, a flag for each block of 64 queries.
constexpr int64_t flag_bytes(int64_t rows) { return (rows / 64 * 4 + 15) / 16 * 16; }

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
  expect_contains(plan.info().why, "not v3: algorithm v3's forward pass has no bias and mask of pairs together with ALiBi");
  scores.dropout_state = at(DType::kI64, {4}, 256);  // of a part of a matrix: another specialisation, which reads more of it
  launched.clear();
  forward(d.forward, options);
  EXPECT_EQ(launched, std::vector<std::string>{"pairs"});
  EXPECT_EQ(last_pairs.dropout_state, scores.dropout_state.data());
  options.algorithm = Algorithm::kV1;
  expect_contains(error_thrown_by([&] { forward(d.forward, options); }), "does not compute");
  options.algorithm = Algorithm::kAuto;
  scores.dropout_state = at(DType::kI64, {2}, 256);

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
  expect_contains(error_thrown_by([&] { backward(d.backward, options); }), "atomic");
  options.deterministic = false;
  options.softcap = 3;
  expect_contains(error_thrown_by([&] { backward(d.backward, options); }), "no dbias with softcap");
}

PagedParams last_paged;
void note_paged(const void* argument) {
  std::memcpy(static_cast<void*>(&last_paged), argument, sizeof last_paged);
  launched.emplace_back("paged");
}

// Where keys are reaches the kernel behind everything else; entries have no stride of their own.
TEST_F(CudaBackend, PagesReachTheKernel) {
  stub().kernel("fattn_v2_fwd", note_paged, sizeof last_paged);
  OnDevice d;
  cuda::Buffer lists(0, 4096);
  const auto at = [&](std::initializer_list<int64_t> shape, std::initializer_list<int64_t> strides, int64_t offset) {
    return Tensor(nullptr, DType::kI32, shape, strides).on(Device::kCuda, 0, static_cast<char*>(lists.get()) + offset);
  };
  for (Tensor* of : {&d.forward.k, &d.forward.v})  // (pages, heads, page_size, headdim)
    *of = Tensor(nullptr, of->dtype(), {10, 10, 2, 64}, {1280, 64, 640, 1}).on(Device::kCuda, 0, of->data());
  d.forward.scores.block_table = at({2, 7}, {9, 1}, 0);
  for (const bool lengths : {false, true}) {
    d.forward.scores.seqused_k = lengths ? at({2}, {3}, 1024) : Tensor();
    launched.clear();
    forward(d.forward, {});
    EXPECT_EQ(launched, std::vector<std::string>{"paged"});
    EXPECT_EQ(last_paged.k, d.forward.k.data());
    EXPECT_EQ(last_paged.k_strides.batch, 0);
    EXPECT_EQ(last_paged.k_strides.row, 64);
    EXPECT_EQ(last_paged.k_strides.head, 640);
    EXPECT_EQ(last_paged.seqlen_k, 70);
    EXPECT_EQ(last_paged.lengths, lengths ? d.forward.scores.seqused_k.data() : nullptr);
    const Pages& pages = last_paged.pages;
    EXPECT_EQ(pages.table, d.forward.scores.block_table.data());
    EXPECT_EQ(pages.table_stride, 9);
    EXPECT_EQ(pages.k_stride, 1280);
    EXPECT_EQ(pages.v_stride, 1280);
    EXPECT_EQ(pages.count, 10);
    EXPECT_EQ(pages.size, 10);
    for (const int key : {0, 9, 10, 19, 69, 1 << 30}) {
      const auto nth = static_cast<uint64_t>(key) * pages.size_factor >> (31 + pages.size_shift);
      EXPECT_EQ(nth, static_cast<uint64_t>(key / 10));
    }
  }
  const Plan plan(d.forward, {});
  expect_contains(plan.info().kernel, "cuda v2 forward bf16");
  expect_contains(plan.info().why, "not v3: algorithm v3 of backend cuda does not compute a paged cache");
}

// Bias and a mask of pairs alone: forward algorithm v3 takes them, with the strides of what is shared.
TEST_F(CudaBackend, BiasAndMaskReachTheForwardKernelOfAlgorithmV3) {
  stub().kernel("fattn_v3_fwd", note_pairs, sizeof last_pairs);
  OnDevice d;
  constexpr int64_t kHeads = OnDevice::kHeads, kSeqlen = OnDevice::kSeqlen;
  cuda::Buffer memory(0, 1 << 20);
  d.forward.scores.bias = Tensor(nullptr, DType::kF32, {1, kHeads, kSeqlen, kSeqlen}).on(Device::kCuda, 0, static_cast<char*>(memory.get()) + 1024);
  d.forward.scores.mask = Tensor(nullptr, DType::kU8, {1, 1, 1, kSeqlen}).on(Device::kCuda, 0, memory.get());
  const Plan plan(d.forward, {});
  expect_contains(plan.info().kernel, "cuda v3 forward bf16");
  launched.clear();
  last_pairs = {};
  forward(d.forward, {});
  EXPECT_EQ(launched, std::vector<std::string>{"pairs"});
  EXPECT_EQ(last_pairs.bias, d.forward.scores.bias.data());
  EXPECT_EQ(last_pairs.bias_strides.batch, 0);
  EXPECT_EQ(last_pairs.bias_strides.head, kSeqlen * kSeqlen);
  EXPECT_EQ(last_pairs.bias_strides.row, kSeqlen);
  EXPECT_EQ(last_pairs.pair_mask, d.forward.scores.mask.data());
  EXPECT_EQ(last_pairs.pair_mask_strides.batch, 0);
  EXPECT_EQ(last_pairs.pair_mask_strides.row, 0);
}

// Where v3 is slower with terms, or was not measured, it is left to who asks for it.
TEST_F(CudaBackend, AlgorithmV3IsNotChosenForTermsThatItIsSlowWith) {
  OnDevice d;
  cuda::Buffer memory(0, 1 << 20);
  const auto bias = [&](int64_t batch, int64_t rows) {
    return Tensor(nullptr, DType::kBF16, {batch, 1, rows, OnDevice::kSeqlen}).on(Device::kCuda, 0, memory.get());
  };
  Options v3;
  v3.algorithm = Algorithm::kV3;
  for (const auto& [batch, rows] : {std::pair{OnDevice::kBatch, int64_t{1}}, std::pair{int64_t{1}, OnDevice::kSeqlen}}) {
    d.forward.scores.bias = bias(batch, rows);  // rows of 200 bytes
    expect_contains(Plan(d.forward, {}).info().why, "not v3: the rows of a bias do not begin at multiples of 16 bytes");
    expect_contains(Plan(d.forward, v3).info().kernel, "cuda v3 forward bf16");
  }
  d.forward.scores.bias = bias(1, 1);
  expect_contains(Plan(d.forward, {}).info().kernel, "cuda v3 forward bf16");
  const auto shortened = [&](const Tensor& of) {
    return Tensor(nullptr, of.dtype(), {OnDevice::kBatch, 63, OnDevice::kHeads, of.shape(3)}).on(Device::kCuda, 0, of.data());
  };
  d.forward.q = shortened(d.forward.q);
  d.forward.o = shortened(d.forward.o);
  d.forward.lse = {};
  expect_contains(Plan(d.forward, {}).info().why, "not v3: 63 queries with a bias are fewer than 64");
  expect_contains(Plan(d.forward, v3).info().kernel, "cuda v3 forward bf16");
  // A mask alone becomes words before the kernel, whatever its rows.
  d.forward.scores.bias = {};
  d.forward.scores.mask = Tensor(nullptr, DType::kU8, {OnDevice::kBatch, 1, 63, OnDevice::kSeqlen}).on(Device::kCuda, 0, memory.get());
  expect_contains(Plan(d.forward, {}).info().kernel, "cuda v3 forward bf16");
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
  const cuda::Buffer for_documents = execute(divided, t);
  EXPECT_EQ(launched, (std::vector<std::string>{"pairs", "pairs", "3", "rest"}));
  EXPECT_EQ(last_pairs.tiles, for_documents.get());
  EXPECT_EQ(last_pairs.document_q, b.scores.document_q.data());

  // Rows of no sequence: there are no ids to look through, and no launch of nothing.
  ForwardTensors nobody = t;
  nobody.scores.cu_seqlens_q = ints(1, 0);
  nobody.scores.cu_seqlens_k = ints(1, 64);
  Options of_nobody = options;
  of_nobody.max_seqlen_q = of_nobody.max_seqlen_k = 0;
  launched.clear();
  forward(nobody, of_nobody);
  EXPECT_EQ(launched.back(), "rest");
  EXPECT_LE(std::count(launched.begin(), launched.end(), "pairs"), 1) << "the list of tiles at most";

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
  options.algorithm = Algorithm::kV2;
  backward(b, options);
  options.algorithm = Algorithm::kAuto;
  EXPECT_EQ(launched, (std::vector<std::string>{"pairs", "pairs", "e", "rest"}));
  EXPECT_EQ(last_pairs.dlse, b.dlse.data());
  EXPECT_EQ(last_pairs.dlse_strides.head, kTotal);
  EXPECT_EQ(last_rest.parts[0].outputs[0].to, b.dq.data());
  EXPECT_EQ(last_rest.parts[0].lse, nullptr) << "backward it is an input";
  EXPECT_EQ(last_rest.parts[1].outputs[0].to, b.dk.data());
  EXPECT_EQ(last_rest.parts[1].outputs[1].to, b.dv.data());
  EXPECT_EQ(last_rest.parts[1].heads, kHeadsK);

  // Algorithm v3 lists tiles of keys; and behind them and the first kernel one finds what the documents leave each 64 keys.
  stub().kernel("fattn_v3_packed_key_tiles", note_pairs, sizeof last_pairs);
  stub().kernel("fattn_v3_bwd_prepare", note_pairs, sizeof last_pairs);
  BackwardTensors whole = b;
  whole.scores.document_q = whole.scores.document_k = {};
  const Plan v3_backward(whole, options);
  expect_contains(v3_backward.info().kernel, "cuda v3 backward bf16");
  const cuda::Buffer more = execute(v3_backward, whole);
  EXPECT_EQ(launched, (std::vector<std::string>{"pairs", "pairs", "B", "E", "rest"}));
  const int64_t rows = kHeads * (kTotal / 64 + 3) * 64;
  EXPECT_EQ(last_pairs.tiles, static_cast<char*>(more.get()) + rows * (kHeaddim + 2) * 4 + flag_bytes(rows));
  EXPECT_EQ(last_pairs.cu_seqlens_k, b.scores.cu_seqlens_k.data());
  EXPECT_EQ(last_pairs.dlse, b.dlse.data());
  whole.scores.seqused_k = ints(3, 128);
  const Plan with_lengths(whole, options);
  expect_contains(with_lengths.info().kernel, "cuda v3 backward bf16");
  cuda::Buffer most(0, with_lengths.workspace_bytes());
  EXPECT_EQ(with_lengths.workspace_bytes(), v3_backward.workspace_bytes());
  launched.clear();
  with_lengths.execute(whole, most.get(), most.bytes(), nullptr);
  EXPECT_EQ(launched, (std::vector<std::string>{"pairs", "pairs", "B", "E", "rest"}));
  EXPECT_EQ(last_rest.lengths, whole.scores.seqused_k.data());
  const Plan with_documents(b, options);
  expect_contains(with_documents.info().kernel, "cuda v3 backward bf16");
  const cuda::Buffer of_documents = execute(with_documents, b);
  EXPECT_EQ(launched, (std::vector<std::string>{"pairs", "pairs", "pairs", "B", "E", "rest"}));
  EXPECT_EQ(last_pairs.tiles, static_cast<char*>(of_documents.get()) + rows * (kHeaddim + 2) * 4 + flag_bytes(rows));
  EXPECT_EQ(last_pairs.document_k, b.scores.document_k.data());
  BackwardTensors none = b;  // no sequence, no ids to look through
  none.scores.cu_seqlens_q = ints(1, 0);
  none.scores.cu_seqlens_k = ints(1, 64);
  launched.clear();
  backward(none, of_nobody);
  EXPECT_EQ(launched, (std::vector<std::string>{"pairs", "E", "rest"})) << "the first kernel and the last alone";

  options.algorithm = Algorithm::kV1;
  expect_contains(error_thrown_by([&] { backward(b, options); }), "does not compute packed sequences");
  options.algorithm = Algorithm::kAuto;
  int32_t host[4] = {};
  b.scores.cu_seqlens_k = b.scores.cu_seqlens_k.on(Device::kCuda, 0, host);
  expect_contains(error_thrown_by([&] { backward(b, options); }), "cu_seqlens_k");
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
  const cuda::Buffer workspace = execute(plan, t);
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
  const cuda::Buffer more = execute(backward, d.backward);
  EXPECT_EQ(launched, (std::vector<std::string>{"pairs", "pairs", "B", "E"}));
  const int64_t rows = OnDevice::kBatch * OnDevice::kHeads * ((OnDevice::kSeqlen + 63) / 64) * 64;
  EXPECT_EQ(last_pairs.tiles, static_cast<char*>(more.get()) + rows * (OnDevice::kHeaddim + 2) * 4 + flag_bytes(rows));
  EXPECT_EQ(last_pairs.document_k, t.scores.document_k.data());
}

// A mask of pairs: algorithm v3 takes it as words, which a kernel before its own makes, backward behind the first.
TEST_F(CudaBackend, AMaskOfPairsReachesTheKernelsOfAlgorithmV3) {
  stub().kernel("fattn_v3_bwd_prepare", note_pairs, sizeof last_pairs);
  stub().kernel("fattn_v3_mask_words", note_pairs, sizeof last_pairs);
  OnDevice d;
  cuda::Buffer memory(0, 1 << 20);
  const Tensor mask = Tensor(nullptr, DType::kU8, {1, OnDevice::kHeads, OnDevice::kSeqlen, OnDevice::kSeqlen}).on(Device::kCuda, 0, memory.get());
  d.backward.scores.mask = mask;
  const Plan plan(d.backward, {});
  expect_contains(plan.info().kernel, "cuda v3 backward bf16");
  const cuda::Buffer workspace = execute(plan, d.backward);
  EXPECT_EQ(launched, (std::vector<std::string>{"pairs", "pairs", "B", "E"}));
  constexpr int64_t kBlocks = (OnDevice::kSeqlen + 63) / 64;
  constexpr int64_t kRows = OnDevice::kBatch * OnDevice::kHeads * kBlocks * 64;
  EXPECT_EQ(last_pairs.tiles, static_cast<char*>(workspace.get()) + kRows * (OnDevice::kHeaddim + 2) * 4 + flag_bytes(kRows) + 512)
      << "which blocks show anything is before the words";
  EXPECT_EQ(last_pairs.pair_mask, mask.data());
  EXPECT_EQ(last_pairs.pair_mask_strides.batch, 0);
  EXPECT_EQ(last_pairs.pair_mask_strides.head, OnDevice::kSeqlen * OnDevice::kSeqlen);

  d.forward.scores.mask = mask;
  const Plan forward(d.forward, {});
  expect_contains(forward.info().kernel, "cuda v3 forward bf16");
  EXPECT_GE(forward.workspace_bytes(), 512 + OnDevice::kHeads * kBlocks * (kBlocks + kBlocks % 2) * 512) << "an even number of blocks of keys";
  const cuda::Buffer words = execute(forward, d.forward);
  EXPECT_EQ(launched, (std::vector<std::string>{"pairs", "3"}));
  EXPECT_EQ(last_pairs.tiles, static_cast<char*>(words.get()) + 512) << "which blocks show anything is before the words";
  EXPECT_EQ(last_pairs.pair_mask, mask.data());
}

// A bias and its gradient in algorithm v3's backward pass: several CTAs add to a tile, which is 0 before, and of 16 bits written behind them; v2
// takes an address that v3 does not.
TEST_F(CudaBackend, ABiasReachesTheKernelsOfAlgorithmV3) {
  stub().kernel("fattn_v3_bwd_prepare", note_pairs, sizeof last_pairs);
  stub().kernel("fattn_v3_bwd_dbias", note<'D'>, sizeof last);
  OnDevice d;
  cuda::Buffer memory(0, 1 << 20);
  const auto at = [&](DType dtype, int64_t offset) {
    return Tensor(nullptr, dtype, {1, OnDevice::kHeads, OnDevice::kSeqlen, OnDevice::kSeqlen})
        .on(Device::kCuda, 0, static_cast<char*>(memory.get()) + offset);
  };
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    d.backward.scores.bias = at(dtype, 0);
    d.backward.dbias = at(dtype, 1 << 19);
    const Plan plan(d.backward, {});
    expect_contains(plan.info().kernel, "cuda v3 backward bf16");
    const cuda::Buffer workspace = execute(plan, d.backward);
    EXPECT_EQ(launched, dtype == DType::kF32 ? (std::vector<std::string>{"z", "pairs", "B", "E", "D"})
                                             : (std::vector<std::string>{"z", "pairs", "B", "E", "D", "Z"}));
    EXPECT_EQ(last_pairs.bias, d.backward.scores.bias.data());
    EXPECT_EQ(last_pairs.dbias_out, d.backward.dbias.data());
    EXPECT_EQ(last_pairs.dbias == last_pairs.dbias_out, dtype == DType::kF32);
    EXPECT_EQ(last_pairs.dbias_strides.head, OnDevice::kSeqlen * OnDevice::kSeqlen);
    EXPECT_EQ(last_pairs.dbias_alone, 0) << "both batch entries add to it";
  }
  d.backward.scores.bias = at(DType::kBF16, 2);
  launched.clear();
  backward(d.backward, {});
  EXPECT_EQ(launched.back(), "Z");
  EXPECT_EQ(std::count(launched.begin(), launched.end(), "B"), 0) << "by v2";
  Options options;
  options.algorithm = Algorithm::kV3;
  expect_contains(error_thrown_by([&] { backward(d.backward, options); }), "multiple of 4 bytes");
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
}

SinksGradientParams last_sinks;
void note_sinks(const void* argument) {
  std::memcpy(static_cast<void*>(&last_sinks), argument, sizeof last_sinks);
  launched.emplace_back("sinks");
}

// Sinks are the forward kernels' own matter, in the place of a pass; their gradient is that of two kernels behind a backward pass of any algorithm.
TEST_F(CudaBackend, SinksReachTheForwardKernelsAndTheirGradientFollows) {
  for (const char* name : {"fattn_v2_fwd", "fattn_v3_fwd"}) stub().kernel(name, note_pairs, sizeof last_pairs);
  for (const char* name : {"fattn_sinks_gradient", "fattn_sinks_gradient_sum"}) stub().kernel(name, note_sinks, sizeof last_sinks);
  OnDevice d;
  cuda::Buffer memory(0, 256);
  const Tensor sinks = Tensor(nullptr, DType::kF32, {OnDevice::kHeads}).on(Device::kCuda, 0, memory.get());
  d.forward.scores.sinks = d.backward.scores.sinks = sinks;
  d.backward.dsinks = sinks.on(Device::kCuda, 0, static_cast<char*>(memory.get()) + 128);
  Options options;
  for (const Algorithm algorithm : {Algorithm::kV2, Algorithm::kV3}) {
    launched.clear();
    last_pairs = {};
    options.algorithm = algorithm;
    forward(d.forward, options);
    EXPECT_EQ(launched, std::vector<std::string>{"pairs"});
    EXPECT_EQ(last_pairs.sinks, sinks.data());
    EXPECT_EQ(last_pairs.sinks_stride, 1);
    launched.clear();
    last_sinks = {};
    backward(d.backward, options);
    ASSERT_EQ(launched.size(), 5u);
    EXPECT_EQ(std::vector(launched.begin() + 3, launched.end()), (std::vector<std::string>{"sinks", "sinks"}));
    EXPECT_EQ(last_sinks.dsinks, d.backward.dsinks.data());
    EXPECT_EQ(last_sinks.all_rows, OnDevice::kBatch * OnDevice::kSeqlen);
    EXPECT_EQ(last_sinks.dlse, nullptr);
  }
  options.algorithm = Algorithm::kV1;
  expect_contains(error_thrown_by([&] { forward(d.forward, options); }), "v1 of backend cuda does not compute sinks");
}

}  // namespace
}  // namespace fattn
