// The network that learns, on a GPU: gradients and twenty steps beside float64 on the host, the same bits on every run, from a graph and after a
// resume, checkpoints between devices, memory as it says. Skipped without a device.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "gpt2/error.h"
#include "gpt2/train/checkpoint.h"
#include "gpu_fixture.h"
#include "network_text.h"

namespace fattn::gpt2 {
namespace {

const Compute kGpu{.gpu = 0};

// Heads of 16, which attention on a GPU takes with 16-byte copies.
Config on_gpu(const std::string& name) {
  Config c = variant(name);
  c.n_layer = 2;
  c.n_embd = 64;
  c.n_inner = 200;
  if (name == "erf") c.activation = Activation::kGelu;
  return c;
}

std::vector<float> copy(Network& network, Flat which) {
  const float* numbers = network.flat(which);
  return {numbers, numbers + network.flat_size()};
}
double largest(const float* x, int64_t n) {
  double most = 0;
  for (int64_t i = 0; i < n; ++i) most = std::max(most, std::fabs(static_cast<double>(x[i])));
  return most;
}
void expect_same(const std::vector<float>& a, const std::vector<float>& b, const char* what) {
  ASSERT_EQ(a.size(), b.size());
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0) << what;
}
// Of each parameter by its own size.
void expect_near(const Network& network, const std::vector<float>& a, const std::vector<float>& b, double allowed, const char* what) {
  for (const Parameter& p : network.parameters()) {
    const double scale = largest(b.data() + p.offset, p.size);
    const double error = error_of(a.data() + p.offset, b.data() + p.offset, static_cast<size_t>(p.size));
    EXPECT_TRUE(error <= allowed * scale) << what << " " << p.name << " " << error / scale;
  }
}

// Steps as the trainer makes them: two passes each.
class Steps {
 public:
  explicit Steps(const Config& config, bool documents) : first_(config, documents, 1), second_(config, documents, 2) {}
  std::vector<double> run(Network& network, int64_t from, int64_t to, double loss_scale = 1) const {
    std::vector<double> losses;
    const auto targets = static_cast<double>(first_.batch.target_count + second_.batch.target_count);
    for (int64_t step = from; step <= to; ++step) {
      network.zero_gradients();
      network.pass(first_.batch, loss_scale / targets, static_cast<uint64_t>(2 * step));
      network.pass(second_.batch, loss_scale / targets, static_cast<uint64_t>(2 * step + 1));
      const UpdateResult result =
          network.update({.learning_rate = 1e-3 / static_cast<double>(step), .step = step, .gradient_scale = 1 / loss_scale, .clip = 1});
      EXPECT_TRUE(result.finite);
      EXPECT_EQ(result.losses.targets, first_.batch.target_count + second_.batch.target_count);
      losses.push_back(result.losses.loss / targets);
    }
    return losses;
  }

 private:
  Text first_, second_;
};

// Kernels that are compiled for a test take its time: other variants than GPT-2 are in bf16 alone.
class TrainGpu : public test::CudaGpu, public testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(Variants, TrainGpu, testing::Values("gpt2", "rotary", "gqa", "scales", "two_sided", "own_head", "erf"),
                         [](const auto& one) { return std::string(one.param); });

void expect_gradients(const Config& config, DType dtype, bool documents, double dropout) {
  SCOPED_TRACE(std::string(name_of(dtype)) + (documents ? ", documents" : "") + (dropout > 0 ? ", dropout" : ""));
  const double allowed = dtype == DType::kF32 ? 2e-5 : dtype == DType::kF16 ? 3e-2 : 2e-1;
  const Beginning start(config);
  const Text text(config, documents);
  NetworkOptions options = options_of();
  options.dropout = dropout;
  Network exact = start.network(options, {.reference = true});
  const LossSum expected = exact.accumulate(text.batch, 1, 3);
  options.dtype = dtype;
  Network network = start.network(options, kGpu);
  const LossSum loss = network.accumulate(text.batch, 1, 3);
  EXPECT_EQ(loss.targets, text.batch.target_count);
  EXPECT_TRUE(std::fabs(loss.loss - expected.loss) <= allowed * expected.loss) << loss.loss << " " << expected.loss;
  EXPECT_TRUE(std::fabs(loss.logit_scale - expected.logit_scale) <= allowed * expected.logit_scale);
  expect_near(network, copy(network, Flat::kGradient), copy(exact, Flat::kGradient), allowed, "gradient of");
  const double evaluated = exact.evaluate(text.batch).loss;
  EXPECT_TRUE(std::fabs(network.evaluate(text.batch).loss - evaluated) <= allowed * evaluated);
}

TEST_P(TrainGpu, GradientsAgreeWithFloat64) {
  const Config config = on_gpu(GetParam());
  expect_gradients(config, DType::kBF16, true, 0);
  if (std::string(GetParam()) != "gpt2") return;
  expect_gradients(config, DType::kBF16, false, 0.2);
  expect_gradients(config, DType::kF32, false, 0);
  expect_gradients(config, DType::kF32, true, 0.2);
  expect_gradients(config, DType::kF16, true, 0);
}

class TrainGpuAlone : public test::CudaGpu {};

TEST_F(TrainGpuAlone, TwentyStepsAreThoseOfFloat64) {
  const Config config = on_gpu("gpt2");
  const Beginning start(config);
  const Steps steps(config, true);
  for (const auto& [dtype, dropout, allowed] : {std::tuple(DType::kF32, 0.1, 1e-4), {DType::kF16, 0.0, 1e-2}, {DType::kBF16, 0.1, 5e-2}}) {
    NetworkOptions options = options_of();
    options.dropout = dropout;
    Network exact = start.network(options, {.reference = true});
    const std::vector<double> expected = steps.run(exact, 1, 20);
    EXPECT_LT(expected.back(), expected.front());
    options.dtype = dtype;
    Network network = start.network(options, kGpu);
    const std::vector<double> losses = steps.run(network, 1, 20, dtype == DType::kF16 ? 1024 : 1);
    for (size_t i = 0; i < losses.size(); ++i)
      EXPECT_TRUE(std::fabs(losses[i] - expected[i]) <= allowed * expected[i])
          << name_of(dtype) << " step " << i + 1 << ": " << losses[i] << " " << expected[i];
    EXPECT_EQ(network.why_no_graph(), "");
  }
}

// Once more, without a graph, with checkpoints, and after arrays went to files and back: not a bit differs.
TEST_F(TrainGpuAlone, TheSameBits) {
  const Config config = on_gpu("gpt2");
  const Beginning start(config);
  for (const auto& [dtype, documents, dropout] : {std::tuple(DType::kF32, false, 0.0), {DType::kBF16, true, 0.1}, {DType::kBF16, false, 0.0}}) {
    SCOPED_TRACE(std::string(name_of(dtype)) + (documents ? ", documents" : ""));
    const Steps steps(config, documents);
    NetworkOptions options = options_of(dtype);
    options.dropout = dropout;
    Network network = start.network(options, kGpu);
    const std::vector<double> losses = steps.run(network, 1, 8);
    const std::vector<float> weights = copy(network, Flat::kMaster), moments = copy(network, Flat::kSecondMoment);
    const auto expect_these = [&](Network& other, const std::vector<double>& others, const char* what) {
      EXPECT_EQ(others, losses) << what;
      expect_same(copy(other, Flat::kMaster), weights, what);
      expect_same(copy(other, Flat::kSecondMoment), moments, what);
    };
    Network again = start.network(options, kGpu);
    expect_these(again, steps.run(again, 1, 8), "once more");
    NetworkOptions other = options;
    other.graph = false;
    Network without = start.network(other, kGpu);
    expect_these(without, steps.run(without, 1, 8), "without a graph");
    other = options;
    other.checkpoint_activations = true;
    Network checkpoints = start.network(other, kGpu);
    expect_these(checkpoints, steps.run(checkpoints, 1, 8), "checkpoints");
    Network first = start.network(options, kGpu), second = start.network(options, kGpu);
    std::vector<double> parts = steps.run(first, 1, 3);
    for (const Flat which : {Flat::kMaster, Flat::kFirstMoment, Flat::kSecondMoment}) second.restore(which, copy(first, which).data());
    for (const double loss : steps.run(second, 4, 8)) parts.push_back(loss);
    expect_these(second, parts, "resumed");
  }
}

TEST_F(TrainGpuAlone, CheckpointsGoFromDeviceToDevice) {
  const Config config = on_gpu("gpt2");
  const Beginning start(config);
  const Steps steps(config, true);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const NetworkOptions options = options_of(dtype);
    for (const bool to_gpu : {false, true}) {
      Network from = start.network(options, to_gpu ? Compute{} : kGpu);
      steps.run(from, 1, 3);
      const test::TemporaryFolder folder;
      Checkpoint checkpoint;
      checkpoint.config = config;
      checkpoint.options.dtype = dtype;
      checkpoint.options.device = to_gpu ? "cpu" : "cuda";
      checkpoint.state.step = checkpoint.state.updates = 3;
      const auto arrays = [](Network& network) {
        return Arrays{&network.parameters(), network.flat_size(), [&network](Flat which) { return network.flat(which); }};
      };
      const std::string path = write_checkpoint(folder.path().string(), checkpoint, arrays(from), {});
      Network to(config, Weights::open(path, config), options, to_gpu ? kGpu : Compute{});
      restore_arrays(read_checkpoint(path), arrays(to), [&](Flat which, const float* numbers) { to.restore(which, numbers); });
      for (const Flat which : {Flat::kMaster, Flat::kFirstMoment, Flat::kSecondMoment}) expect_same(copy(to, which), copy(from, which), "an array");
      const std::vector<double> a = steps.run(from, 4, 8), b = steps.run(to, 4, 8);
      for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(std::fabs(a[i] - b[i]) <= (dtype == DType::kF32 ? 1e-4 : 2e-2) * a[i]) << a[i] << " " << b[i];
    }
  }
}

TEST_F(TrainGpuAlone, MemoryIsWhatItSays) {
  const Config config = on_gpu("gpt2");
  const Beginning start(config);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    NetworkOptions options = options_of(dtype);
    const Network warm = start.network(options, kGpu);  // opens libraries, loads kernels
    size_t said = 0;
    for (const TrainingMemory& use : Network::memory(config, options, kGpu)) said += use.bytes;
    ASSERT_GE(said, size_t{4} << 20);
    const size_t before = cuda::memory(0).free_bytes;
    const Network network = start.network(options, kGpu);
    EXPECT_EQ(before - cuda::memory(0).free_bytes, said) << name_of(dtype);
  }
}

TEST_F(TrainGpuAlone, WhatIsNotANumberChangesNothing) {
  const Config config = on_gpu("gpt2");
  const Beginning start(config);
  const Text text(config, false);
  Network network = start.network(options_of(), kGpu);
  for (int turn = 0; turn < 3; ++turn) {  // at once, captured, replayed
    network.zero_gradients();
    network.accumulate(text.batch, 1, 0);
    const std::vector<float> before = copy(network, Flat::kMaster), good = copy(network, Flat::kGradient);
    std::vector<float> bad = good;
    const Parameter& parameter = network.parameters()[6];
    bad[static_cast<size_t>(parameter.offset + parameter.size - 1)] = INFINITY;
    network.restore(Flat::kGradient, bad.data());
    const UpdateResult result = network.update({.learning_rate = 1e-3});
    EXPECT_FALSE(result.finite);
    EXPECT_EQ(result.first_bad, parameter.name);
    expect_same(copy(network, Flat::kMaster), before, "nothing was updated");
  }
  std::vector<float> weights = copy(network, Flat::kMaster);
  weights[static_cast<size_t>(network.parameters()[2].offset)] = NAN;
  network.restore(Flat::kMaster, weights.data());
  network.zero_gradients();
  network.pass(text.batch, 1, 0);
  const UpdateResult result = network.update({.learning_rate = 1e-3});
  EXPECT_TRUE(std::isnan(result.losses.loss) && std::isnan(result.losses.logit_scale));
  EXPECT_FALSE(result.finite);
  EXPECT_TRUE(std::isnan(network.evaluate(text.batch).loss));
}

TEST_F(TrainGpuAlone, SaysWhatIsAllowed) {
  const Config config = on_gpu("gpt2");
  const Beginning start(config);
  Network network = start.network(options_of(), kGpu);
  Text text(config, false);
  text.ids[3] = 131;
  EXPECT_THROW(network.evaluate(text.batch), Error);
  text.ids[3] = 0, text.targets[3] = -2;
  EXPECT_THROW(network.accumulate(text.batch, 1, 0), Error);
  text.targets[3] = 1, text.positions[3] = 64;
  EXPECT_THROW(network.accumulate(text.batch, 1, 0), Error);
  NetworkOptions options = options_of();
  options.sequences = int64_t{1} << 24;
  try {
    start.network(options, kGpu);
    ADD_FAILURE() << "there is no memory for that";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("bytes"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace fattn::gpt2
