// Training on a GPU without one: stubs of the driver, of NVRTC and of cuBLASLt. What is sent, launched, captured and read, memory, errors; what the
// kernels compute is for a real GPU (test_gpt2_train_gpu).
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "device_abi/training_params.h"
#include "gpt2/error.h"
#include "gpt2/weights/convert.h"
#include "jit_test.h"
#include "network_text.h"
#include "stub/cublaslt_stub.h"
#include "stub/cuda_stub.h"
#include "thrown.h"

namespace fattn::gpt2 {
namespace {

using test::CudaStub;
using test::expect_contains;

const bool stubs_are_set = test::use_stubs(FATTN_STUB_CUDA_PATH);

const CudaStub& stub() {
  static const CudaStub loaded(FATTN_STUB_CUDA_PATH);
  return loaded;
}

const Compute kGpu{.gpu = 0};

// What the last launches were told, read as they ran: a graph's are those of its replay.
std::vector<int> targets;
uint64_t dropout_state[2];
AdamWChanging changing;
const void* weights = nullptr;
double loss_of_a_pass = 0, square_sum = 0;

void loss_sums(const void* argument) {
  LossSumsParams p;
  std::memcpy(&p, argument, sizeof p);
  targets.assign(p.target, p.target + p.rows);
  p.sums[0] += loss_of_a_pass;
  p.sums[1] = std::max(p.sums[1], 3.0);
}
void dropout(const void* argument) {
  DropoutParams p;
  std::memcpy(&p, argument, sizeof p);
  std::memcpy(dropout_state, p.state, sizeof dropout_state);
}
void join_squares(const void* argument) {
  JoinSquaresParams p;
  std::memcpy(&p, argument, sizeof p);
  *p.sum = p.finite && !std::isfinite(*p.finite) ? NAN : square_sum;
}
void adamw(const void* argument) {
  AdamWParams p;
  std::memcpy(&p, argument, sizeof p);
  changing = *p.changing;
  weights = p.weight;
}

class TrainCuda : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(stubs_are_set);
    stub().set("registers", 255);
    stub().kernel("fattn_ops_loss_sums", loss_sums, sizeof(LossSumsParams));
    stub().kernel("fattn_ops_dropout", dropout, sizeof(DropoutParams));
    stub().kernel("fattn_ops_join_squares", join_squares, sizeof(JoinSquaresParams));
    stub().kernel("fattn_ops_adamw", adamw, sizeof(AdamWParams));
    loss_of_a_pass = 5, square_sum = 9;
  }
  static Config config() {
    Config c = small();
    c.n_embd = 64;
    c.n_layer = 2;
    return c;
  }
  test::CacheFolder folder_;
  const Beginning start_{config()};
};

TEST_F(TrainCuda, AStepIsAFewLaunchesAndOneCopyBack) {
  NetworkOptions options = options_of(DType::kBF16);
  options.dropout = 0.1;
  Network network = start_.network(options, kGpu);
  const Text first(config(), false, 1), second(config(), false, 2);
  int64_t launches = 0, kernels = 0, allocations = 0, uploads = 0, downloads = 0, graphs = 0;
  const auto note = [&] {
    launches = stub().calls("cuGraphLaunch");
    kernels = stub().calls("cuLaunchKernelEx");
    allocations = stub().calls("cuMemAlloc_v2");
    uploads = stub().calls("cuMemcpyHtoDAsync_v2");
    downloads = stub().calls("cuMemcpyDtoHAsync_v2");
    graphs = stub().calls("cuGraphInstantiateWithFlags");
  };
  uint64_t last_stream = 0;
  for (int64_t step = 1; step <= 5; ++step) {
    note();
    network.zero_gradients();
    network.pass(first.batch, 0.5, static_cast<uint64_t>(2 * step));
    EXPECT_EQ(targets, first.targets) << step;
    network.pass(second.batch, 0.5, static_cast<uint64_t>(2 * step + 1));
    EXPECT_EQ(targets, second.targets) << step;
    EXPECT_EQ(dropout_state[0], options.seed);
    EXPECT_GT(dropout_state[1], last_stream) << "each pass drops others";
    last_stream = dropout_state[1];
    const UpdateResult result = network.update({.learning_rate = 0.25 / static_cast<double>(step), .step = step, .gradient_scale = 2});
    EXPECT_EQ(changing.learning_rate, 0.25 / static_cast<double>(step)) << "a graph reads it anew";
    EXPECT_EQ(changing.step, step);
    EXPECT_EQ(result.losses.loss, 10);
    EXPECT_EQ(result.losses.logit_scale, 3);
    EXPECT_EQ(result.losses.targets, 2 * kSequences * kSeqlen);
    EXPECT_EQ(result.gradient_norm, 6);
    EXPECT_TRUE(result.finite);
    if (step < 3) continue;
    EXPECT_EQ(stub().calls("cuGraphLaunch"), launches + 3);
    EXPECT_EQ(stub().calls("cuLaunchKernelEx"), kernels) << "nothing is launched alone";
    EXPECT_EQ(stub().calls("cuMemAlloc_v2"), allocations);
    EXPECT_EQ(stub().calls("cuMemcpyHtoDAsync_v2"), uploads + 3);
    EXPECT_EQ(stub().calls("cuMemcpyDtoHAsync_v2"), downloads + 1);
    EXPECT_EQ(stub().calls("cuGraphInstantiateWithFlags"), graphs);
  }
  EXPECT_EQ(network.why_no_graph(), "");
  // Documents have a graph of their own, as have evaluations.
  const Text documents(config(), true);
  for (int turn = 0; turn < 3; ++turn) {
    note();
    const LossSum loss = network.accumulate(documents.batch, 1, 1);
    EXPECT_EQ(loss.loss, 5);
    EXPECT_EQ(loss.targets, documents.batch.target_count);
    EXPECT_EQ(network.evaluate(documents.batch).loss, 5);
    EXPECT_EQ(stub().calls("cuGraphInstantiateWithFlags"), graphs + (turn == 1 ? 2 : 0));
  }
  // Another constant of the optimizer is another graph.
  const auto update = [&](double clip) {
    note();
    network.update({.learning_rate = 1, .clip = clip});
    return stub().calls("cuGraphLaunch") - launches;
  };
  EXPECT_EQ(update(0), 1);
  EXPECT_EQ(update(1), 0);
  EXPECT_EQ(update(1), 1);
}

TEST_F(TrainCuda, GoesOnWithoutAGraph) {
  Network network = start_.network(options_of(), kGpu);
  const Text text(config(), false);
  stub().fault("cuGraphInstantiateWithFlags", 801, 1);
  for (int turn = 0; turn < 4; ++turn) EXPECT_EQ(network.accumulate(text.batch, 1, 0).loss, 5);
  expect_contains(network.why_no_graph(), "making a captured graph executable");
  NetworkOptions options = options_of();
  options.graph = false;
  Network without = start_.network(options, kGpu);
  const int64_t graphs = stub().calls("cuGraphInstantiateWithFlags");
  for (int turn = 0; turn < 4; ++turn) without.accumulate(text.batch, 1, 0);
  EXPECT_EQ(stub().calls("cuGraphInstantiateWithFlags"), graphs);
  EXPECT_EQ(without.why_no_graph(), "");
}

TEST_F(TrainCuda, WhatIsNotANumberIsSaid) {
  Network network = start_.network(options_of(), kGpu);
  const Text text(config(), false);
  square_sum = INFINITY;
  network.pass(text.batch, 1, 0);
  UpdateResult result = network.update({.learning_rate = 1});
  EXPECT_FALSE(result.finite);
  EXPECT_EQ(result.first_bad, network.parameters().front().name);
  square_sum = 1, loss_of_a_pass = NAN;
  network.pass(text.batch, 1, 0);
  result = network.update({.learning_rate = 1});
  EXPECT_FALSE(result.finite) << "nor is anything written for a loss that is none";
  EXPECT_EQ(result.first_bad, "");
  loss_of_a_pass = 2;
  network.pass(text.batch, 1, 0);
  EXPECT_TRUE(network.update({.learning_rate = 1}).finite) << "the next step begins anew";
}

TEST_F(TrainCuda, MemoryIsWhatItSays) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    NetworkOptions options = options_of(dtype);
    options.dropout = 0.1;
    size_t said = 0;
    for (const TrainingMemory& use : Network::memory(config(), options, kGpu)) said += use.bytes;
    const int64_t before = stub().alive("bytes"), streams = stub().alive("streams"), graphs = stub().alive("graphs"), events = stub().alive("events"),
                  host = stub().alive("host allocations");
    {
      Network network = start_.network(options, kGpu);
      EXPECT_EQ(static_cast<size_t>(stub().alive("bytes") - before), said) << name_of(dtype);
      const Text text(config(), true);
      for (int turn = 0; turn < 3; ++turn) network.accumulate(text.batch, 1, 0);
      network.update({.learning_rate = 1});
      EXPECT_EQ(static_cast<size_t>(stub().alive("bytes") - before), said);
    }
    EXPECT_EQ(stub().alive("bytes"), before);
    EXPECT_EQ(stub().alive("streams"), streams);
    EXPECT_EQ(stub().alive("graphs"), graphs);
    EXPECT_EQ(stub().alive("events"), events);
    EXPECT_EQ(stub().alive("host allocations"), host);
  }
  stub().fault("cuMemAlloc_v2", 2, 1);
  try {
    start_.network(options_of(), kGpu);
    ADD_FAILURE() << "there was no memory";
  } catch (const Error& error) {
    expect_contains(error.what(), "training: cuda:0");
    expect_contains(error.what(), "bytes are free");
  }
}

TEST_F(TrainCuda, ArraysGoUpAndCome) {
  Network network = start_.network(options_of(DType::kBF16), kGpu);
  const auto n = static_cast<size_t>(network.flat_size());
  const Network host = start_.network(options_of(DType::kBF16));
  for (const Parameter& p : network.parameters())
    EXPECT_EQ(std::memcmp(network.flat(Flat::kMaster) + p.offset, const_cast<Network&>(host).flat(Flat::kMaster) + p.offset,
                          static_cast<size_t>(p.size) * sizeof(float)),
              0)
        << p.name;
  std::vector<float> numbers(n);
  for (size_t i = 0; i < n; ++i) numbers[i] = std::sin(static_cast<float>(i));
  for (const Flat which : {Flat::kMaster, Flat::kGradient, Flat::kFirstMoment, Flat::kSecondMoment}) {
    network.restore(which, numbers.data());
    EXPECT_EQ(std::memcmp(network.flat(which), numbers.data(), n * sizeof(float)), 0);
    numbers[0] += 1;
  }
  numbers[0] -= 4;
  network.update({.learning_rate = 1});  // whose last call is of what does not decay
  std::vector<uint16_t> narrow(n);
  convert(numbers.data(), DType::kF32, narrow.data(), DType::kBF16, n);
  int64_t decaying = 0;
  for (const Parameter& p : network.parameters())
    if (p.decays) decaying = std::max(decaying, (p.offset + p.size + 15) / 16 * 16);
  EXPECT_EQ(std::memcmp(weights, narrow.data() + decaying, (n - static_cast<size_t>(decaying)) * 2), 0) << "products read what was restored";
}

TEST_F(TrainCuda, SaysWhatIsAllowed) {
  Network network = start_.network(options_of(), kGpu);
  Text text(config(), false);
  const auto refused = [&] { return test::thrown_by([&] { network.pass(text.batch, 1, 0); }); };
  text.ids[3] = 131;
  expect_contains(refused(), "token 131 of row 3; allowed: 0 to 130");
  text.ids[3] = 0, text.targets[5] = -2;
  expect_contains(refused(), "target -2 of row 5; allowed: -1 to 130");
  text.targets[5] = 1, text.positions[1] = 64;
  expect_contains(refused(), "position 64 of row 1; allowed: 0 to 63");
  text.positions[1] = 0;
  EXPECT_EQ(refused(), "nothing was thrown");
}

// An algorithm that knows no documents trains on data without them.
TEST_F(TrainCuda, DocumentsAreRefusedWhereTheyCome) {
  NetworkOptions options = options_of(DType::kF16);
  options.algorithm = Algorithm::kV1;
  Network network = start_.network(options, kGpu);
  const Text whole(config(), false), documents(config(), true);
  EXPECT_EQ(network.accumulate(whole.batch, 1, 0).loss, 5);
  try {
    network.accumulate(documents.batch, 1, 0);
    ADD_FAILURE() << "algorithm v1 knows no documents";
  } catch (const fattn::Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    expect_contains(error.what(), "document");
  }
}

}  // namespace
}  // namespace fattn::gpt2
