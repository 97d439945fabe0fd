// Lists in device memory, and what is done where the caller wants to know that they are out of range, on stubs of driver and NVRTC.
#include <algorithm>

#include "backend/cuda/requests.h"
#include "cuda_backend.h"
#include "device_abi/list_status_params.h"
#include "fattn/plan.hpp"
#include "problem/problem.h"

namespace fattn {
namespace {

using namespace test::launches;

ListStatusParams last_status;
void note_status(const void* argument) {
  std::memcpy(&last_status, argument, sizeof last_status);
  launched.emplace_back("status");
}

class CudaLists : public CudaBackend {
 protected:
  void SetUp() override {
    CudaBackend::SetUp();
    stub().kernel("fattn_list_status", note_status, sizeof last_status);
    stub().kernel("fattn_sequence_rest", note_rest, sizeof last_rest);
    stub().kernel("fattn_v3_fwd", note_pairs, sizeof last_pairs);
    stub().kernel("fattn_v3_packed_tiles", note_pairs, sizeof last_pairs);
  }
  void TearDown() override { fattn_set_check(FATTN_CHECK_NONE); }

  Tensor ints(int64_t offset, std::initializer_list<int32_t> values) {
    memory_.copy_from(values.begin(), values.size() * sizeof(int32_t), nullptr, static_cast<size_t>(offset));
    return Tensor(nullptr, DType::kI32, {static_cast<int64_t>(values.size())}).on(Device::kCuda, 0, static_cast<char*>(memory_.get()) + offset);
  }
  static ForwardTensors packed(const OnDevice& d) {
    ForwardTensors t = d.forward;
    const auto rows = [](const Tensor& of) { return Tensor(nullptr, of.dtype(), {200, of.shape(2), 64}).on(Device::kCuda, 0, of.data()); };
    for (Tensor* of : {&t.q, &t.k, &t.v, &t.o}) *of = rows(*of);
    t.lse = {};
    return t;
  }
  cuda::Buffer memory_{0, 4096};
};

TEST_F(CudaLists, OutOfRangeIsAnErrorUnderSync) {
  OnDevice d;
  Options options;
  options.check = Check::kSync;
  d.forward.scores.seqused_k = ints(0, {100, 0});
  forward(d.forward, options);
  EXPECT_EQ(launched, std::vector<std::string>{"pairs"});
  launched.clear();
  d.forward.scores.seqused_k = ints(0, {100, 101});
  test::expect_contains(error_thrown_by([&] { forward(d.forward, options); }), "invalid_argument: seqused_k[1] is 101; allowed: 0 to seqlen_k, 100");
  EXPECT_TRUE(launched.empty()) << "nothing is computed";
  options.check = Check::kAuto;
  forward(d.forward, options);
  EXPECT_EQ(launched, std::vector<std::string>{"pairs"}) << "at first nothing is looked at";
  ASSERT_EQ(fattn_set_check(FATTN_CHECK_SYNC), FATTN_OK);
  test::expect_contains(error_thrown_by([&] { forward(d.forward, options); }), "seqused_k[1] is 101");
  options.check = Check::kNone;
  forward(d.forward, options);
}

// A plan that leaves it open asks at each call: torch keeps its plans.
TEST_F(CudaLists, WhatTheProcessSaysIsOfPlansThatThereAre) {
  OnDevice d;
  d.forward.scores.seqused_k = ints(0, {100, 101});
  const Plan plan(d.forward, {});
  const cuda::Buffer workspace(0, plan.workspace_bytes() + 1);
  const auto run = [&] { plan.execute(d.forward, workspace.get(), plan.workspace_bytes()); };
  run();
  fattn_set_check(FATTN_CHECK_SYNC);
  test::expect_contains(error_thrown_by(run), "seqused_k[1] is 101");
  fattn_set_check(FATTN_CHECK_NONE);
  run();
}

// As on the CPU.
TEST_F(CudaLists, LengthsOfNoQueriesAreNotLookedAt) {
  OnDevice d;
  for (Tensor* t : {&d.forward.q, &d.forward.o}) *t = Tensor(nullptr, t->dtype(), {2, 0, t->shape(2), 64}).on(Device::kCuda, 0, t->data());
  d.forward.lse = {};
  d.forward.scores.seqused_k = ints(0, {100, 101});
  d.forward.scores.status = ints(1024, {-1, -1});
  Options options;
  options.check = Check::kSync;
  forward(d.forward, options);
  EXPECT_EQ(launched, std::vector<std::string>{"status"});
  EXPECT_EQ(last_status.lengths, nullptr);
}

TEST_F(CudaLists, PagesOutOfRangeAreErrorsUnderSync) {
  OnDevice d;
  for (Tensor* of : {&d.forward.k, &d.forward.v}) *of = Tensor(nullptr, of->dtype(), {4, 50, of->shape(2), 64}).on(Device::kCuda, 0, of->data());
  const auto table = [&](std::initializer_list<int32_t> numbers) {
    return Tensor(nullptr, DType::kI32, {2, 2}).on(Device::kCuda, 0, ints(0, numbers).data());
  };
  Options options;
  options.check = Check::kSync;
  d.forward.scores.block_table = table({0, 1, 2, 3});
  forward(d.forward, options);
  EXPECT_EQ(launched, std::vector<std::string>{"f"});
  d.forward.scores.block_table = table({0, 1, 2, 4});
  test::expect_contains(error_thrown_by([&] { forward(d.forward, options); }),
                        "block_table[1, 1] is 4, of 100 keys; allowed: 0 to 3, the last page of k");
  d.forward.scores.seqused_k = ints(1024, {100, 50});
  forward(d.forward, options);  // nobody reads it
  d.forward.scores.seqused_k = ints(1024, {101, 50});
  test::expect_contains(error_thrown_by([&] { forward(d.forward, options); }), "seqused_k[0] is 101");
}

TEST_F(CudaLists, OffsetsOutOfRangeAreErrorsUnderSync) {
  OnDevice d;
  ForwardTensors t = packed(d);
  Options options;
  options.check = Check::kSync;
  options.max_seqlen_q = options.max_seqlen_k = 90;
  const auto answer = [&](std::initializer_list<int32_t> of_q, std::initializer_list<int32_t> of_k, std::initializer_list<int32_t> used) {
    t.scores.cu_seqlens_q = ints(0, of_q);
    t.scores.cu_seqlens_k = ints(256, of_k);
    t.scores.seqused_k = ints(512, used);
    launched.clear();
    const std::string error = error_thrown_by([&] { forward(t, options); });
    EXPECT_EQ(launched.empty(), error != "nothing was thrown");
    return error;
  };
  EXPECT_EQ(answer({0, 80, 90, 180}, {0, 10, 100, 190}, {10, 0, 90}), "nothing was thrown");
  EXPECT_EQ(answer({0, 80, 90, 180}, {190, 100, 10, -3}, {10, 0, 90}), "nothing was thrown") << "with seqused_k in any order, and only beginnings";
  test::expect_contains(answer({1, 80, 90, 180}, {0, 10, 100, 190}, {10, 0, 90}), "cu_seqlens_q[0] is 1; it must be 0");
  test::expect_contains(answer({0, 80, 79, 160}, {0, 10, 100, 190}, {10, 0, 90}), "cu_seqlens_q[2] is 79; allowed: 80");
  test::expect_contains(answer({0, 80, 90, 180}, {0, 10, 201, 190}, {10, 0, 0}), "cu_seqlens_k[2] is 201; allowed: 0 to total_k, 200");
  test::expect_contains(answer({0, 80, 90, 180}, {0, 10, 100, 190}, {10, 91, 0}), "seqused_k[1] is 91; allowed: 0 to max_seqlen_k, 90");
  test::expect_contains(answer({0, 80, 90, 180}, {0, 10, 120, 190}, {10, 0, 90}),
                        "seqused_k[2] is 90; allowed: 0 to 80, the rows of k from cu_seqlens_k[2] on");
  t.scores.seqused_k = {};
  const auto without = [&](std::initializer_list<int32_t> of_k) {
    t.scores.cu_seqlens_q = ints(0, {0, 80, 90, 180});
    t.scores.cu_seqlens_k = ints(256, of_k);
    return error_thrown_by([&] { forward(t, options); });
  };
  EXPECT_EQ(without({0, 10, 100, 190}), "nothing was thrown");
  test::expect_contains(without({0, 10, 100, 201}), "cu_seqlens_k[3] is 201");
  test::expect_contains(without({0, 10, 101, 190}), "a sequence of 91; allowed: up to max_seqlen_k, 90");
}

// Without lists nothing is waited for.
TEST_F(CudaLists, ACapturedStreamCannotBeWaitedFor) {
  OnDevice d;
  Options options;
  options.check = Check::kSync;
  const cuda::Stream stream(0);
  cuda::Buffer workspace(0, 1 << 20);
  const Plan without(d.forward, options);
  d.forward.scores.seqused_k = ints(0, {100, 0});
  const Plan with(d.forward, options);
  const ScoreTensors lengths = d.forward.scores;
  const cuda::Graph graph(stream, [&] {
    d.forward.scores = {};
    without.execute(d.forward, workspace.get(), 1 << 20, stream.get());
    d.forward.scores = lengths;
    test::expect_contains(error_thrown_by([&] { with.execute(d.forward, workspace.get(), 1 << 20, stream.get()); }),
                          "check is sync, which waits for the stream, and the stream is being captured");
  });
}

// Packs and warm caches have it, whatever computes the problem.
TEST_F(CudaLists, TheKernelOfTheStatusIsAmongThoseOfAProblem) {
  OnDevice d;
  d.forward.scores.status = ints(1024, {-1, -1});
  const auto count = [&](Algorithm algorithm) {
    Options options;
    options.algorithm = algorithm;
    const auto requests = core::requests_for(core::validate(describe(d.forward, options)), 90);
    return std::count_if(requests.begin(), requests.end(), [](const auto& request) { return request.entry == "fattn_list_status"; });
  };
  for (const Algorithm algorithm : {Algorithm::kAuto, Algorithm::kStandard, Algorithm::kV1, Algorithm::kV2, Algorithm::kV3})
    EXPECT_EQ(count(algorithm), 1);
  for (Tensor* t : {&d.forward.q, &d.forward.o}) *t = Tensor(nullptr, t->dtype(), {2, 1, t->shape(2), 64}).on(Device::kCuda, 0, t->data());
  d.forward.lse = {};
  EXPECT_EQ(count(Algorithm::kAuto), 1) << "decode";
  d.forward.scores.status = {};
  EXPECT_EQ(count(Algorithm::kAuto), 0);
}

TEST_F(CudaLists, StatusIsWrittenByAKernelBeforeThePass) {
  OnDevice d;
  d.forward.scores.seqused_k = ints(0, {100, 7});
  d.forward.scores.status = ints(1024, {-1, -1});
  forward(d.forward, {});
  EXPECT_EQ(launched, (std::vector<std::string>{"status", "pairs"}));
  EXPECT_EQ(last_status.status, d.forward.scores.status.data());
  EXPECT_EQ(last_status.of_q.offsets, nullptr);
  EXPECT_EQ(last_status.lengths, d.forward.scores.seqused_k.data());
  EXPECT_EQ(last_status.batch, 2);
  EXPECT_EQ(last_status.seqlen_k, 100);

  ForwardTensors t = packed(d);
  t.scores = {};
  t.scores.cu_seqlens_q = ints(0, {0, 80, 90, 180});
  t.scores.cu_seqlens_k = ints(256, {0, 10, 100, 190});
  t.scores.status = d.forward.scores.status;
  Options options;
  options.max_seqlen_q = 80, options.max_seqlen_k = 90;
  launched.clear();
  forward(t, options);
  EXPECT_EQ(launched, (std::vector<std::string>{"status", "pairs", "pairs", "rest"}));
  EXPECT_EQ(last_status.of_q.offsets, t.scores.cu_seqlens_q.data());
  EXPECT_EQ(last_status.of_q.total, 200);
  EXPECT_EQ(last_status.of_q.most, 80);
  EXPECT_EQ(last_status.of_k.most, 90);
  EXPECT_EQ(last_status.batch, 3);
  EXPECT_EQ(last_status.lengths, nullptr);
}

}  // namespace
}  // namespace fattn
