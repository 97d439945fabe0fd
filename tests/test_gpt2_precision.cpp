// Each rule of precision broken on purpose, beside float64: what `fattn gpt2 precision` says happens does, and the network's own plans do not do it.
// The tracker and the search for the first bad tensor see what is there.
#include "gpt2/train/precision.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "gpt2/error.h"
#include "gpt2/train/plans.h"
#include "gpt2/train/tracker.h"
#include "network_text.h"
#include "shared/half.h"

namespace fattn::gpt2 {
namespace {

// A number as the dtype keeps it: what a rule is broken with.
double rounded(DType dtype, double x) {
  const auto f = static_cast<float>(x);
  if (dtype == DType::kF16) return static_cast<double>(core::f16_to_float(core::float_to_f16(f)));
  if (dtype == DType::kBF16) return static_cast<double>(core::bf16_to_float(core::float_to_bf16(f)));
  return static_cast<double>(f);
}
double sum_in(DType dtype, double term, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum = rounded(dtype, sum + rounded(dtype, term));
  return sum;
}

constexpr DType kF16 = DType::kF16, kBF16 = DType::kBF16, kF32 = DType::kF32;

TEST(Gpt2PrecisionSmall, SafeDefaults) {
  for (const DType dtype : {kF32, kF16, kBF16}) {
    const Precision p(dtype);
    EXPECT_EQ(p.rules().size(), 11u);
    for (const Role role : {Role::kWeights, Role::kEmbeddings, Role::kQkv, Role::kMlp, Role::kActivationGradients}) EXPECT_EQ(p.stored(role), dtype);
    for (const Role role : {Role::kAttentionWeights, Role::kResidual, Role::kNormStatistics, Role::kLoss, Role::kGradients, Role::kOptimizer})
      EXPECT_EQ(p.stored(role), kF32);
    for (const PrecisionRule& rule : p.rules()) EXPECT_EQ(rule.summed, kF32) << rule.name;
    EXPECT_EQ(p.scales_loss(), dtype == kF16);
  }
  EXPECT_THROW(Precision{DType::kF64}, Error);
}

// The plans of a network are what the table says.
TEST(Gpt2PrecisionSmall, PlansAskTheTable) {
  for (const DType dtype : {kF32, kF16, kBF16}) {
    const Precision p(dtype);
    Config config = small();
    config.positions = Positions::kRotary;
    const NetworkPlans plans(config, options_of(dtype), {});
    EXPECT_EQ(plans.embedding.problem().dtype, p.stored(Role::kEmbeddings));
    EXPECT_EQ(plans.norm.problem().dtype, p.stored(Role::kWeights));
    EXPECT_EQ(plans.loss.problem().dtype, p.stored(Role::kWeights));
    EXPECT_EQ(plans.step.problem().dtype, p.stored(Role::kWeights));
    EXPECT_EQ(plans.qkv.forward.problem().c, p.stored(Role::kQkv));
    EXPECT_EQ(plans.attn_proj.dx.problem().c, p.stored(Role::kQkv));
    EXPECT_EQ(plans.turn.problem().dtype, p.stored(Role::kQkv));
    EXPECT_EQ(plans.fc.forward.problem().c, p.stored(Role::kMlp));
    EXPECT_EQ(plans.activate.problem().dtype, p.stored(Role::kMlp));
    EXPECT_EQ(plans.mlp_proj.dx.problem().c, p.stored(Role::kMlp));
    for (const LinearPlans* l : {&plans.attn_proj, &plans.mlp_proj}) EXPECT_EQ(l->forward.problem().c, p.stored(Role::kResidual));
    for (const LinearPlans* l : {&plans.qkv, &plans.fc}) EXPECT_EQ(l->dx.problem().c, p.stored(Role::kResidual));
    for (const LinearPlans* l : {&plans.qkv, &plans.attn_proj, &plans.fc, &plans.mlp_proj}) {
      EXPECT_EQ(l->forward.problem().b, p.stored(Role::kWeights));
      EXPECT_EQ(l->dweight.problem().c, p.stored(Role::kGradients));
    }
  }
}

// "A sum of equal terms stops at 256 of them in bf16, in fp16 at 2,048"; a product of the library does not.
TEST(Gpt2PrecisionSmall, SumsIn16BitsStop) {
  EXPECT_EQ(sum_in(kBF16, 1, 4096), 256);
  EXPECT_EQ(sum_in(kF16, 1, 4096), 2048);
  const ops::Device device;
  for (const DType dtype : {kF16, kBF16}) {
    const int64_t n = 4096;
    const std::vector<uint16_t> ones(static_cast<size_t>(n), dtype == kF16 ? core::float_to_f16(1) : core::float_to_bf16(1));
    const ops::Plan<ops::Product> product(ops::Product{1, 1, n, false, false, dtype, dtype, kF32}, device);
    const ops::Plan<ops::ColumnSums> sums(ops::ColumnSums{n, 1, dtype}, device);
    std::vector<std::byte> workspace(std::max(product.workspace_bytes(), sums.workspace_bytes()) + 64);
    float sum = 0, column = 0;
    void* aligned = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(workspace.data()) + 63) / 64 * 64);
    product.execute({1, ones.data(), ones.data(), nullptr, nullptr, &sum}, aligned);
    sums.execute({n, ones.data(), &column}, aligned);
    EXPECT_EQ(sum, 4096);
    EXPECT_EQ(column, 4096);
  }
}

// "48 layers that each add 1/512 of the stream add nothing"
TEST(Gpt2PrecisionSmall, ResidualStreamInBf16Forgets) {
  double broken = 1, stream = 1;
  for (int i = 0; i < 48; ++i) {
    broken = rounded(kBF16, broken + 1.0 / 512);
    stream = rounded(kF32, stream + 1.0 / 512);
  }
  EXPECT_EQ(broken, 1);
  EXPECT_NEAR(stream, 1 + 48.0 / 512, 1e-6);
}

// Softmax and its log-sum-exp are attention's.
TEST(Gpt2PrecisionSmall, AttentionWeightsIn16Bits) {
  EXPECT_EQ(sum_in(kBF16, 1, 4096), 256);  // of exp(s - max) of 4,096 equal scores
  double worst = 0;
  for (double lse = 16; lse < 24; lse += 0.001) worst = std::max(worst, std::fabs(std::exp(lse - rounded(kBF16, lse)) - 1));
  EXPECT_GT(worst, 0.06);
  EXPECT_LT(worst, 0.065);
  // The library on 4,096 equal scores: o is v, lse is log 4096.
  const int64_t n = 4096, d = 32;
  for (const DType dtype : {kF16, kBF16}) {
    const uint16_t one = dtype == kF16 ? core::float_to_f16(1) : core::float_to_bf16(1);
    const std::vector<uint16_t> zeros(static_cast<size_t>(n * d), 0), ones(static_cast<size_t>(n * d), one);
    std::vector<uint16_t> o(static_cast<size_t>(d));
    float lse = 0;
    ForwardTensors t;
    t.q = Tensor(zeros.data(), dtype, {1, 1, 1, d});
    t.k = Tensor(zeros.data(), dtype, {1, n, 1, d});
    t.v = Tensor(ones.data(), dtype, {1, n, 1, d});
    t.o = Tensor(o.data(), dtype, {1, 1, 1, d});
    t.lse = Tensor(&lse, kF32, {1, 1, 1});
    fattn::Options options;
    options.backend = Backend::kCpu;
    const Plan plan(t, options);
    std::vector<std::byte> workspace(plan.workspace_bytes() + 256);
    plan.execute(t, reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(workspace.data()) + 255) / 256 * 256), plan.workspace_bytes());
    EXPECT_NEAR(lse, std::log(4096.0), 1e-5);
    for (const uint16_t x : o) EXPECT_EQ(x, one);
  }
}

// A row of LayerNorm with every step rounded.
std::vector<double> normed_in(DType dtype, const std::vector<float>& x) {
  const auto n = static_cast<double>(x.size());
  double sum = 0, squares = 0;
  for (const float v : x) sum = rounded(dtype, sum + rounded(dtype, static_cast<double>(v)) / n);
  for (const float v : x)
    squares = rounded(dtype, squares + rounded(dtype, std::pow(rounded(dtype, rounded(dtype, static_cast<double>(v)) - sum), 2)));
  const double deviation = rounded(dtype, std::sqrt(rounded(dtype, squares / n) + 1e-5));
  std::vector<double> y;
  for (const float v : x) y.push_back((rounded(dtype, static_cast<double>(v)) - sum) / deviation);
  return y;
}

TEST(Gpt2PrecisionSmall, StatisticsOfLayerNormIn16Bits) {
  const int64_t width = 768;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const ops::Plan<ops::LayerNorm> plan(ops::LayerNorm{1, width, 1e-5, kF32}, {});
  std::vector<std::byte> workspace(plan.workspace_bytes() + 64);
  const std::vector<float> ones(static_cast<size_t>(width), 1), zeros(static_cast<size_t>(width), 0);
  const auto worst = [&](const std::function<float()>& value, DType broken, double& of_plan) {
    std::vector<float> x, y(static_cast<size_t>(width));
    for (int64_t i = 0; i < width; ++i) x.push_back(value());
    plan.execute({1, x.data(), nullptr, nullptr, ones.data(), zeros.data(), y.data()}, workspace.data());
    double mean = 0, variance = 0;
    for (const float v : x) mean += static_cast<double>(v) / static_cast<double>(width);
    for (const float v : x) variance += std::pow(static_cast<double>(v) - mean, 2) / static_cast<double>(width);
    const std::vector<double> other = normed_in(broken, x);
    double most = 0;
    of_plan = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      const double exact = (static_cast<double>(x[i]) - mean) / std::sqrt(variance + 1e-5);
      of_plan = std::max(of_plan, std::fabs(static_cast<double>(y[i]) - exact));
      if (!(std::fabs(other[i] - exact) <= most)) most = std::fabs(other[i] - exact);
    }
    return most;
  };
  double ours = 0;
  EXPECT_GT(worst([&] { return 100 + normal(random); }, kBF16, ours), 0.3);  // of numbers whose deviation is 1
  EXPECT_LT(ours, 1e-3);
  EXPECT_TRUE(std::isinf(rounded(kF16, 256.0 * 256)));
  // Numbers of 300 and -300: the squares are Inf, so that all of the row becomes 0.
  double sign = 1;
  EXPECT_GE(worst([&] { return static_cast<float>((sign = -sign) * 300); }, kF16, ours), 0.999);
  EXPECT_LT(ours, 1e-5);
}

// "In fp16 the sum of 8,192 losses of 10.8 stops at 32,768 of 88,474, in bf16 at 4,096"; the network sums in float64.
TEST(Gpt2PrecisionSmall, LossIn16BitsStops) {
  EXPECT_EQ(sum_in(kF16, 10.8, 8192), 32768);
  EXPECT_EQ(sum_in(kBF16, 10.8, 8192), 4096);
  const Beginning start(small());
  const Text text(start.config, false);
  Network exact = start.network(options_of(), {.reference = true});
  const double expected = exact.evaluate(text.batch).loss;
  for (const DType dtype : {kF16, kBF16}) {
    Network network = start.network(options_of(dtype));
    EXPECT_TRUE(std::fabs(network.evaluate(text.batch).loss / expected - 1) <= 8 * unit_roundoff(dtype));
  }
}

// A second moment in bf16 with beta2 0.999 does not fall, and updates below 1/512 leave a bf16 master as it is; AdamWStep has both in fp32.
TEST(Gpt2PrecisionSmall, OptimizerIn16BitsStandsStill) {
  const ops::Plan<ops::AdamWStep> plan(ops::AdamWStep{1, kF32}, {});
  std::vector<std::byte> workspace(plan.workspace_bytes() + 64);
  struct Moments {
    float master = 1, m = 0, v = 1;
  } ours, masters_in_bf16, moments_in_bf16;
  double master = 1, m = 0, v = 1;
  for (int64_t t = 1; t <= 2000; ++t) {
    const float gradient = 0.01f;
    const double g = static_cast<double>(gradient), rate = 1e-4;
    m += 0.1 * (g - m), v += 0.001 * (g * g - v);
    master -= rate * (m / (1 - std::pow(0.9, t)) / (std::sqrt(v / (1 - std::pow(0.999, t))) + 1e-8));
    for (Moments* one : {&ours, &masters_in_bf16, &moments_in_bf16}) {
      ops::AdamWStep::Buffers b{1, &gradient, &one->master, &one->m, &one->v};
      b.learning_rate = rate, b.beta2 = 0.999, b.step = t;
      plan.execute(b, workspace.data());
    }
    masters_in_bf16.master = static_cast<float>(rounded(kBF16, static_cast<double>(masters_in_bf16.master)));
    moments_in_bf16.v = static_cast<float>(rounded(kBF16, static_cast<double>(moments_in_bf16.v)));
  }
  EXPECT_NEAR(static_cast<double>(ours.master), master, 1e-4 * (1 - master) + 2e-5);
  EXPECT_NEAR(static_cast<double>(ours.v), v, 1e-4 * v);
  EXPECT_LT(v, 0.14);
  EXPECT_EQ(masters_in_bf16.master, 1);
  EXPECT_EQ(moments_in_bf16.v, 1);
  EXPECT_GT((1 - master) / (1 - static_cast<double>(moments_in_bf16.master)), 1.3);  // steps that stay too small
}

std::vector<float> gradients_of(Network& network, const Batch& batch, double scale) {
  network.zero_gradients();
  network.accumulate(batch, scale, 0);
  std::vector<float> all(network.flat(Flat::kGradient), network.flat(Flat::kGradient) + network.flat_size());
  for (float& x : all) x = static_cast<float>(static_cast<double>(x) / scale);
  return all;
}

// Without a loss scale small gradients of fp16 are gone, with it they are there: the network itself, the loss divided by a million targets.
TEST(Gpt2PrecisionSmall, Fp16NeedsALossScale) {
  const Beginning start(small());
  const Text text(start.config, false);
  Network exact = start.network(options_of());
  Network fp16 = start.network(options_of(kF16));
  const std::vector<float> expected = gradients_of(exact, text.batch, 1);
  const auto error = [&](double scale) {
    const std::vector<float> got = gradients_of(fp16, text.batch, scale);
    double wrong = 0, all = 0;
    for (const Parameter& p : fp16.parameters()) {
      if (p.name != "h.0.mlp.c_fc.weight") continue;
      for (auto i = static_cast<size_t>(p.offset); i < static_cast<size_t>(p.offset + p.size); ++i) {
        wrong += std::pow(static_cast<double>(got[i] - expected[i]), 2);
        all += std::pow(static_cast<double>(expected[i]), 2);
      }
    }
    return std::sqrt(wrong / all);
  };
  const double targets = 1 << 24;
  EXPECT_GT(error(1 / targets), 0.3);
  EXPECT_TRUE(error(65536 / targets) <= 2e-2);
}

std::vector<nlohmann::json> lines_of_file(const std::string& path) {
  std::vector<nlohmann::json> all;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) all.push_back(nlohmann::json::parse(line));
  return all;
}

TEST(Gpt2PrecisionSmall, TrackerSeesUnderflowAndOverflow) {
  const Beginning start(small());
  const Text text(start.config, true);
  test::TemporaryFolder folder;
  const std::string path = (folder.path() / "track.jsonl").string();
  Network fp16 = start.network(options_of(kF16));
  {
    PrecisionTracker tracker(path, 0, kF16, start.config.layer_norm_epsilon);
    const auto step = [&](int64_t number, double scale) {
      tracker.begin(number, scale);
      fp16.watch(&tracker);
      fp16.zero_gradients();
      const LossSum sum = fp16.accumulate(text.batch, scale, 0);
      fp16.watch(nullptr);
      tracker.see_logits(sum.logit_scale, sum.targets, fp16.vocab_size());
      tracker.see_gradients(fp16);
      tracker.end();
    };
    step(1, 64);
    EXPECT_TRUE(tracker.found().empty());
    step(2, 0x1p-24);
    step(3, 0x1p40);
    EXPECT_EQ(tracker.steps(), 3);
  }
  int64_t underflows = 0, overflows = 0;
  for (const nlohmann::json& line : lines_of_file(path)) {
    EXPECT_NE(line["step"], 1);
    if (line["kind"] == "underflow") {
      EXPECT_EQ(line["step"], 2);
      EXPECT_GT(line["value"], PrecisionTracker::kMostUnderflow);
      EXPECT_EQ(line["dtypes"]["stored"], "fp16");
      ++underflows;
    }
    if (line["kind"] == "overflow" && line["tensor"] == "gradient of h.2.mlp.inner") {
      EXPECT_EQ(line["step"], 3);
      EXPECT_EQ(line["shape"], (nlohmann::json{kSequences * kSeqlen, 100}));
      ++overflows;
    }
  }
  EXPECT_EQ(underflows, 3 * 3);  // three tensors of three layers
  EXPECT_EQ(overflows, 1);
  // A run that goes on from step 2 leaves out what came after it.
  PrecisionTracker again(path, 2, kF16, start.config.layer_norm_epsilon);
  EXPECT_EQ(lines_of_file(path).size(), static_cast<size_t>(underflows));
}

TEST(Gpt2PrecisionSmall, TrackerSeesStatisticsAndLogits) {
  const Beginning start(small());
  const Text text(start.config, false);
  test::TemporaryFolder folder;
  Network network = start.network(options_of(kBF16));
  std::vector<float> weights(network.flat(Flat::kMaster), network.flat(Flat::kMaster) + network.flat_size());
  for (const Parameter& p : network.parameters()) {
    const auto begin = weights.begin() + p.offset, end = begin + p.size;
    if (p.name == "wpe.weight") std::fill(begin, end, 0.0f);
    if (p.name == "wte.weight") std::fill(begin, end, 0.5f);  // rows without variance
    if (p.name == "ln_f.bias") std::fill(begin, end, 10.0f);  // logits of 48 * 10 * 0.5
  }
  network.restore(Flat::kMaster, weights.data());
  PrecisionTracker tracker((folder.path() / "track.jsonl").string(), 0, kBF16, start.config.layer_norm_epsilon);
  tracker.begin(1, 1);
  network.watch(&tracker);
  const LossSum sum = network.accumulate(text.batch, 1, 0);
  network.watch(nullptr);
  tracker.see_logits(sum.logit_scale, sum.targets, network.vocab_size());
  tracker.end();
  bool statistics = false, logits = false;
  for (const PrecisionTracker::Found& found : tracker.found()) {
    statistics = statistics || (found.kind == Violation::kStatistics && found.tensor == "embedding" && found.worst == 1);
    logits = logits || (found.kind == Violation::kLogits && found.tensor == "logits" && found.worst > 128);
  }
  EXPECT_TRUE(statistics && logits);
}

// The first tensor in the order of the passes, not a gradient that has it from there.
TEST(Gpt2PrecisionSmall, FirstBadTensorIsNamed) {
  const Beginning start(small());
  const Text text(start.config, false);
  for (const auto& [weight, expected] :
       {std::pair("h.1.mlp.c_fc.bias", "'h.1.mlp.inner' (63 x 100, fp16)"), std::pair("h.0.attn.c_proj.weight", "'h.0.middle' (63 x 48, fp32)"),
        std::pair("ln_f.weight", "'ln_f.out' (63 x 48, fp16)")}) {
    Network network = start.network(options_of(kF16));
    std::vector<float> weights(network.flat(Flat::kMaster), network.flat(Flat::kMaster) + network.flat_size());
    for (const Parameter& p : network.parameters())
      if (p.name == weight) weights[static_cast<size_t>(p.offset) + 3] = 1e6f;  // Inf in fp16
    network.restore(Flat::kMaster, weights.data());
    FirstBad first;
    network.watch(&first);
    network.accumulate(text.batch, 1, 0);
    network.watch(nullptr);
    EXPECT_EQ(first.name(), expected);
  }
}

}  // namespace
}  // namespace fattn::gpt2
