// Attention over several ranks (fattn/ring.hpp): what differs between ranks, what is refused, who is gone.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "fattn/fattn.hpp"
#include "owned_tensor.h"
#include "ring_of_threads.h"
#include "thrown.h"

namespace fattn::testing {
namespace {

using test::thrown_by;

// A plan of the forward pass on `rows` rows of q beside the rank's, and what it says.
void plan(RingTransport& transport, const RingSequence& sequence, const Options& options, int64_t more_rows = 0, DType dtype = DType::kF32) {
  const RingSchedule held = ring_schedule(sequence, transport.rank(), transport.ranks());
  const Owned q(dtype, {1, held.rows_q + more_rows, 2, 8}), k(dtype, {1, held.rows_k, 1, 8});
  const RingPlan made(transport, sequence, ForwardTensors{q.view(), k.view(), k.view(), q.view(), {}, {}}, options);
}

TEST(RingErrorsSmall, WhatDiffersIsNamedOnAllRanks) {
  RingSequence sequence;
  sequence.seqlen_q = sequence.seqlen_k = 30;
  const auto thrown_on_ranks = [&](const std::function<void(RingTransport&)>& body) {
    Mailboxes boxes;
    return in_threads(3, [&](int rank) {
      ThreadTransport transport(boxes, rank, 3, false);
      body(transport);
    });
  };
  const auto expect_all = [](const std::vector<std::string>& thrown, const std::string& wanted) {
    for (const std::string& text : thrown) EXPECT_NE(text.find(wanted), std::string::npos) << text;
  };
  expect_all(thrown_on_ranks([&](RingTransport& t) {
               Options options;
               options.window_left = t.rank() == 1 ? 3 : 4;
               plan(t, sequence, options);
             }),
             "window_left is 3 on rank 1 and 4 on rank 0; all ranks must plan the same ring attention");
  expect_all(thrown_on_ranks([&](RingTransport& t) { plan(t, sequence, {}, 0, t.rank() == 2 ? DType::kBF16 : DType::kF32); }),
             "dtype is bf16 on rank 2 and fp32 on rank 0");
  expect_all(thrown_on_ranks([&](RingTransport& t) {
               RingSequence other = sequence;
               other.seqlen_k = t.rank() == 2 ? 29 : 30;
               plan(t, other, {});
             }),
             "seqlen_k is 29 on rank 2 and 30 on rank 0");
  const std::vector<std::string> one = thrown_on_ranks([&](RingTransport& t) { plan(t, sequence, {}, t.rank() == 1 ? 1 : 0); });
  EXPECT_EQ(one[1].find("q has 11 rows; rank 1 of 3 holds 10"), 0u) << one[1];
  for (const size_t rank : {0, 2}) EXPECT_EQ(one[rank].find("arguments is q has 11 rows; rank 1 of 3 holds 10"), 0u) << one[rank];
}

TEST(RingErrorsSmall, WhatIsRefused) {
  Mailboxes boxes;
  ThreadTransport transport(boxes, 0, 1, false);
  RingSequence sequence;
  sequence.seqlen_q = sequence.seqlen_k = 4;
  const Owned q(DType::kF32, {1, 4, 2, 8}), ids(DType::kI32, {1, 4}), one_slope(DType::kF32, {1}), four(DType::kI64, {4}),
      pairs(DType::kF32, {1, 1, 1, 3}), other_kind(DType::kF32, {1, 1, 1, 4});
  const auto said = [&](const std::function<void(ForwardTensors&, Options&)>& change) -> std::string {
    ForwardTensors t{q.view(), q.view(), q.view(), q.view(), {}, {}};
    Options options;
    change(t, options);
    return thrown_by([&] { RingPlan(transport, sequence, t, options); });
  };
  const auto expect = [](const std::string& text, const std::string& wanted) { EXPECT_NE(text.find(wanted), std::string::npos) << text; };
  EXPECT_EQ(said([](ForwardTensors&, Options&) {}), "nothing was thrown");
  expect(said([&](ForwardTensors& t, Options&) { t.scores.seqused_k = ids.view(); }),
         "ring attention in C++ has no lengths of keys (seqused_k); it has causal masks");
  expect(said([&](ForwardTensors& t, Options&) { t.scores.alibi_slopes = one_slope.view(); }),
         "alibi_slopes is not fp32 (nheads) or (batch, nheads)");
  expect(said([](ForwardTensors&, Options& o) { o.p_dropout = 0.5; }), "p_dropout is 0.5");
  expect(said([&](ForwardTensors& t, Options& o) {
           o.p_dropout = 0.5;
           t.scores.dropout_state = four.view();
         }),
         "dropout_state is not two int64 side by side");
  expect(said([&](ForwardTensors& t, Options&) { t.scores.bias = pairs.view(); }),
         "bias is not (batch or 1, nheads or 1, rows or 1, keys of all ranks), here 1, 2, 4 and 4");
  expect(said([&](ForwardTensors& t, Options&) { t.scores.mask = other_kind.view(); }), "mask is fp32; allowed: u8");
  expect(said([&](ForwardTensors& t, Options&) { t.scores.document_q = ids.view(); }), "document_q and document_k belong together");
  for (const Tensor& bad : {Tensor(ids.view().data(), DType::kI64, {1, 4}), Tensor(ids.view().data(), DType::kI32, {1, 4}, {8, 2}),
                            Tensor(ids.view().data(), DType::kI32, {2, 4})})
    expect(said([&](ForwardTensors& t, Options&) {
             t.scores.document_q = bad;
             t.scores.document_k = ids.view();
           }),
           "document_q is not int32 (batch, rows), here a batch of 1, with rows side by side");
  expect(said([&](ForwardTensors& t, Options&) { t.v = {}; }), "q, k, v or o is absent");
  expect(said([&](ForwardTensors& t, Options&) {
           t.k = Tensor(q.view().data(), DType::kF32, {1, 4, 2, 8}, {64, 8, 32, 1});
         }),
         "k has a stride of 32 in dimension 2; its rows travel, and must lie behind each other without gaps (8)");
  expect(said([&](ForwardTensors& t, Options&) {
           t.q = t.k = t.v = t.o = Tensor(q.view().data(), DType::kF64, {1, 4, 2, 8});
         }),
         "ring attention in C++ takes fp32");
  const Owned sinks(DType::kF16, {2}), one_sink(DType::kF32, {1}), narrow(DType::kF32, {1, 4, 2, 4}), half(DType::kF16, {1, 4, 2, 8}),
      lse(DType::kF32, {1, 2, 4});
  expect(said([&](ForwardTensors& t, Options&) { t.scores.sinks = sinks.view(); }), "sinks is not fp32 (nheads); q has 2 heads");
  expect(said([&](ForwardTensors& t, Options&) { t.scores.sinks = one_sink.view(); }), "sinks is not fp32 (nheads); q has 2 heads");
  expect(said([&](ForwardTensors& t, Options&) { t.o = narrow.view(); }),
         "o has batch 1, 2 heads of 4; expected batch 1, 2 heads of 8, from q and v");
  expect(said([&](ForwardTensors& t, Options&) { t.o = half.view(); }), "o is fp16 and q fp32; allowed: q's dtype");
  expect(said([&](ForwardTensors& t, Options&) { t.o = t.o.on(Device::kCuda, 0, q.view().data()); }), "o and q are on different devices");
  expect(said([](ForwardTensors&, Options& o) { o.softcap = -1; }), "softcap is -1");
  expect(said([&](ForwardTensors& t, Options&) { t.scores.alibi_slopes = Tensor(lse.view().data(), DType::kF32, {2}, {-1}); }),
         "alibi_slopes has the stride -1 in dimension 0; strides must be at least 0. Copy the tensor first");
}

// Beside dropout rank 1, whose rows begin at 10, copies the mask: no block's call sees the strides of heads.
TEST(RingErrorsSmall, NegativeStridesAreRefused) {
  Mailboxes boxes;
  ThreadTransport transport(boxes, 1, 2, false);
  RingSequence sequence{20, 20, RingLayout::kContiguous, {}, {}, false};
  const Owned q(DType::kF32, {1, 10, 2, 8}), mask(DType::kU8, {1, 2, 10, 20}), state(DType::kI64, {2});
  ForwardTensors t{q.view(), q.view(), q.view(), q.view(), {}, {}};
  t.scores.mask = Tensor(mask.memory.data() + 200, DType::kU8, {1, 2, 10, 20}, {400, -200, 20, 1});
  t.scores.dropout_state = state.view();
  Options options;
  options.p_dropout = 0.5;
  const std::string error = thrown_by([&] { RingPlan(transport, sequence, t, options); });
  EXPECT_EQ(error.find("mask has the stride -200 in dimension 1; strides must be at least 0. Copy the tensor first"), 0u) << error;
}

// What the plan reads by itself, before any block's call looks at it.
TEST(RingErrorsSmall, TensorsWithoutMemoryAreRefused) {
  Mailboxes boxes;
  ThreadTransport transport(boxes, 0, 1, false);
  RingSequence sequence;
  sequence.seqlen_q = sequence.seqlen_k = 4;
  const Owned q(DType::kF32, {1, 4, 2, 8}), state(DType::kI64, {2});
  ForwardTensors t{q.view(), q.view(), q.view(), q.view(), {}, {}};
  t.scores.dropout_state = state.view();
  Options options;
  options.p_dropout = 0.5;
  RingPlan plan(transport, sequence, t, options);
  std::vector<char> memory(static_cast<size_t>(plan.workspace_bytes()) + 256);
  void* const workspace = memory.data() + (256 - reinterpret_cast<uintptr_t>(memory.data()) % 256) % 256;
  t.scores.dropout_state = Tensor(nullptr, DType::kI64, {2}).on(Device::kCpu, 0, nullptr);
  const std::string error = thrown_by([&] { plan.execute(t, workspace, static_cast<size_t>(plan.workspace_bytes())); });
  EXPECT_NE(error.find("dropout_state has elements and no memory"), std::string::npos) << error;
}

TEST(RingErrorsSmall, BackwardTensorsOfOtherKindsAreRefused) {
  Mailboxes boxes;
  ThreadTransport transport(boxes, 0, 1, false);
  RingSequence sequence;
  sequence.seqlen_q = sequence.seqlen_k = 4;
  const Owned q(DType::kF32, {1, 4, 2, 8}), half(DType::kF16, {1, 4, 2, 8}), lse(DType::kF32, {1, 2, 4}), ids(DType::kI32, {1, 4});
  BackwardTensors t{q.view(), q.view(), q.view(), q.view(), lse.view(), q.view(), q.view(), half.view(), q.view()};
  EXPECT_NE(thrown_by([&] { RingPlan(transport, sequence, t, {}); }).find("dk is fp16 and q fp32; allowed: q's dtype"), std::string::npos);
  const Owned k = normal(DType::kF32, {1, 4, 2, 8}, 1), o(DType::kF32, {1, 4, 2, 8});
  ForwardTensors f{k.view(), k.view(), k.view(), o.view(), {}, {}};
  RingPlan plan(transport, sequence, f, {});
  std::vector<char> memory(plan.workspace_bytes() + 512);
  char* const workspace = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.data()) + 255) / 256 * 256);
  const char* const other = "these tensors are not as the plan was made for";
  f.scores.document_q = f.scores.document_k = ids.view();
  EXPECT_NE(thrown_by([&] { plan.execute(f, workspace, plan.workspace_bytes()); }).find(other), std::string::npos);
  f.scores = {};
  t.dk = q.view();
  EXPECT_NE(thrown_by([&] { plan.execute(t, workspace, plan.workspace_bytes()); }).find(other), std::string::npos);
  EXPECT_NE(thrown_by([&] { plan.execute(f, workspace + 4, plan.workspace_bytes()); }).find("the workspace is not aligned to 256 bytes"),
            std::string::npos);
  EXPECT_NE(thrown_by([&] { plan.execute(f, workspace, 16); }).find("the workspace has 16 bytes; the plan needs "), std::string::npos);
  plan.execute(f, workspace, plan.workspace_bytes());
}

TEST(RingErrorsSmall, AGroupNamesWhoIsGone) {
  const GroupId id = new_group_id();
  char sent[8] = {}, received[8] = {};
  const std::vector<std::string> thrown = in_threads(2, [&](int rank) {
    HostGroup group(rank, 2, id, 0.5);
    if (rank == 1) return std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    group.begin({{sent, 8, 1, true}, {received, 8, 1, false}}, nullptr);
    group.finish(nullptr);
  });
  EXPECT_EQ(thrown[1], "");
  EXPECT_NE(thrown[0].find("rank 0 of 2 has waited 0.5 seconds for rank 1 to exchange, which has ended, hangs"), std::string::npos) << thrown[0];
}

TEST(RingErrorsSmall, AGroupRefusesWhatMakesNoSense) {
  const auto expect = [](const std::string& text, const std::string& wanted) { EXPECT_NE(text.find(wanted), std::string::npos) << text; };
  Group alone;  // needs no NCCL
  alone.begin({}, nullptr);
  alone.finish(nullptr);
  alone.settle();
  char byte = 0;
  expect(thrown_by([&] { alone.finish(nullptr); }), "finish without a begin before it");
  expect(thrown_by([&] { alone.begin({{&byte, 1, 0, true}}, nullptr); }), "a piece's peer is 0; allowed: another rank");
  alone.begin({}, nullptr);
  expect(thrown_by([&] { alone.settle(); }), "1 begun and not finished");
  alone.finish(nullptr);
  const GroupId id = new_group_id();
  expect(thrown_by([&] { HostGroup(2, 2, id); }), "rank is 2 and nranks 2; allowed: 0 <= rank < nranks");
  expect(thrown_by([&] { HostGroup(0, 2, id, -1); }), "timeout is -1 seconds; allowed: more than 0");
  expect(thrown_by([&] { HostGroup(0, 2, id, 0.2); }), "rank 0 of 2 has waited 0.2 seconds for all ranks to join the group");
}

}  // namespace
}  // namespace fattn::testing

// Read when NCCL is first wanted.
const int fattn_nccl_is_the_stub = setenv("FATTN_NCCL", FATTN_STUB_NCCL_PATH, 1);
