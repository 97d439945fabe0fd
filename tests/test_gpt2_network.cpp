// The network that learns: gradients beside slopes and beside float64, the same bits however it is computed, memory as it says.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "fattn/error.hpp"
#include "gpt2/error.h"
#include "network_text.h"

namespace fattn::gpt2 {
namespace {

std::vector<float> copy(Network& network, Flat which) { return {network.flat(which), network.flat(which) + network.flat_size()}; }
std::vector<float> gradients(Network& network, const Batch& batch, double scale = 1, uint64_t draw = 3) {
  network.zero_gradients();
  network.accumulate(batch, scale, draw);
  return copy(network, Flat::kGradient);
}
double largest(const float* x, int64_t n) {
  double most = 0;
  for (int64_t i = 0; i < n; ++i) most = std::max(most, std::fabs(static_cast<double>(x[i])));
  return most;
}
void expect_same(const std::vector<float>& a, const std::vector<float>& b, const char* what) {
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0) << what;
}

// What is slow in float64 is no part of a group with Small in its name.
class NetworkExact : public testing::TestWithParam<const char*> {};
class NetworkSmall : public testing::TestWithParam<const char*> {};
const auto variants = testing::Values("gpt2", "rotary", "gqa", "scales", "two_sided", "own_head", "erf");
std::string name_of_variant(const testing::TestParamInfo<const char*>& one) { return one.param; }
INSTANTIATE_TEST_SUITE_P(Variants, NetworkExact, variants, name_of_variant);
INSTANTIATE_TEST_SUITE_P(Variants, NetworkSmall, variants, name_of_variant);
Config config_of(const char* name) {
  Config c = variant(name);
  c.n_layer = 2;
  if (std::string(name) == "erf") c.activation = Activation::kGelu;
  return c;
}

// The gradient along a direction is the slope of the loss, for all numbers [begin, end).
void expect_slope(Network& network, const std::vector<float>& gradient, int64_t begin, int64_t end, const std::function<double()>& loss,
                  const std::string& what) {
  const std::vector<float> here = copy(network, Flat::kMaster);
  std::vector<float> there = here, back = here;
  std::mt19937 random(2);
  std::normal_distribution<double> normal;
  const double step = 2e-3;
  double predicted = 0, size = 0;
  for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
    const double direction = normal(random);
    there[i] = static_cast<float>(here[i] + step * direction);
    back[i] = static_cast<float>(here[i] - step * direction);
    predicted += gradient[i] * (static_cast<double>(there[i]) - static_cast<double>(back[i])) / (2 * step);
    size += std::pow(gradient[i], 2);
  }
  network.restore(Flat::kMaster, there.data());
  const double above = loss();
  network.restore(Flat::kMaster, back.data());
  const double slope = (above - loss()) / (2 * step);
  // The loss is a sum of 63 in fp32, and curves.
  EXPECT_TRUE(std::fabs(slope - predicted) <= 4e-3 * std::sqrt(size) + 1e-3) << what << " " << slope << " " << predicted;
  network.restore(Flat::kMaster, here.data());
}

// Tensor by tensor, with documents; with dropout those that every place of it has a part in.
TEST_P(NetworkExact, GradientsAreSlopes) {
  const Config config = config_of(GetParam());
  const Beginning start(config);
  const Text text(config, true);
  NetworkOptions options = options_of();
  Network network = start.network(options, {.reference = true});
  std::vector<float> gradient = gradients(network, text.batch, 0.5);
  const auto evaluated = [&] { return 0.5 * network.evaluate(text.batch).loss; };
  for (const Parameter& p : network.parameters()) expect_slope(network, gradient, p.offset, p.offset + p.size, evaluated, p.name);
  options.dropout = 0.2;
  Network drops = start.network(options, {.reference = true});
  gradient = gradients(drops, text.batch, 0.5);
  const auto dropped = [&] { return 0.5 * drops.accumulate(text.batch, 1, 3).loss; };
  for (const Parameter& p : drops.parameters())
    if (p.name == "h.0.attn.c_attn.weight" || p.name == "h.0.mlp.c_fc.weight" || p.name == "wte.weight")
      expect_slope(drops, gradient, p.offset, p.offset + p.size, dropped, p.name + " with dropout");
}

TEST_P(NetworkExact, AgreesWithFloat64) {
  const Config config = config_of(GetParam());
  const Beginning start(config);
  for (const bool documents : {false, true})
    for (const double dropout : {0.0, 0.2}) {
      const Text text(config, documents);
      NetworkOptions options = options_of();
      options.dropout = dropout;
      Network exact = start.network(options, {.reference = true});
      const LossSum expected = exact.accumulate(text.batch, 1, 3);
      const std::vector<float> b = copy(exact, Flat::kGradient);
      for (const auto& [dtype, allowed] : {std::pair(DType::kF32, 2e-5), std::pair(DType::kF16, 3e-2), std::pair(DType::kBF16, 2e-1)}) {
        options.dtype = dtype;
        Network network = start.network(options);
        const LossSum loss = network.accumulate(text.batch, 1, 3);
        EXPECT_EQ(loss.targets, text.batch.target_count);
        EXPECT_TRUE(std::fabs(loss.loss - expected.loss) <= allowed * expected.loss);
        EXPECT_TRUE(std::fabs(loss.logit_scale - expected.logit_scale) <= allowed * expected.logit_scale);
        const std::vector<float> a = copy(network, Flat::kGradient);
        for (const Parameter& p : network.parameters()) {
          const double scale = largest(b.data() + p.offset, p.size);
          ASSERT_GT(scale, 0) << p.name;
          const double error = error_of(a.data() + p.offset, b.data() + p.offset, static_cast<size_t>(p.size));
          EXPECT_TRUE(error <= allowed * scale) << p.name << " " << name_of(dtype) << " " << error / scale;
        }
      }
    }
}

// The losses are those of the model that generates.
TEST_P(NetworkSmall, IsTheModel) {
  const Config config = config_of(GetParam());
  const Beginning start(config);
  const Text text(config, false);
  const std::vector<float> logits = all_logits(Model::load(start.folder()), {text.ids.begin(), text.ids.begin() + kSeqlen});
  double expected = 0;
  for (int64_t r = 0; r < kSeqlen; ++r) {
    const float* row = logits.data() + r * config.padded_vocab();
    double sum = 0;
    for (int64_t v = 0; v < config.vocab_size; ++v) sum += std::exp(static_cast<double>(row[v]));
    expected += std::log(sum) - row[text.targets[static_cast<size_t>(r)]];
  }
  Network network = start.network(options_of());
  Batch one = text.batch;
  one.sequences = 1;
  const LossSum loss = network.evaluate(one);
  EXPECT_EQ(loss.targets, kSeqlen);
  EXPECT_TRUE(std::fabs(loss.loss - expected) <= 1e-5 * expected) << loss.loss << " " << expected;
}

// However many threads, with checkpoints or without, once more: not a bit differs.
TEST_P(NetworkSmall, TheSameBits) {
  const Config config = config_of(GetParam());
  const Beginning start(config);
  const Text text(config, true);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    NetworkOptions options = options_of(dtype);
    options.dropout = 0.1;
    Network one = start.network(options, {.threads = 1});
    const std::vector<float> expected = gradients(one, text.batch);
    expect_same(gradients(one, text.batch), expected, "once more");
    Network three = start.network(options, {.threads = 3});
    expect_same(gradients(three, text.batch), expected, "threads");
    options.checkpoint_activations = true;
    Network checkpoints = start.network(options, {.threads = 2});
    expect_same(gradients(checkpoints, text.batch), expected, "checkpoints");
    EXPECT_NE(std::memcmp(gradients(one, text.batch, 1, 4).data(), expected.data(), expected.size() * 4), 0) << "another draw drops others";
    const AdamW adam{.learning_rate = 1e-3, .clip = 1};
    for (Network* network : {&one, &three}) gradients(*network, text.batch), network->update(adam);
    expect_same(copy(one, Flat::kMaster), copy(three, Flat::kMaster), "a step");
    expect_same(copy(one, Flat::kSecondMoment), copy(three, Flat::kSecondMoment), "moments");
  }
}

TEST(NetworkSmallBatch, AShorterOneIsTheSame) {
  const Config config = config_of("gpt2");
  const Beginning start(config);
  Text text(config, true);
  Network network = start.network(options_of());
  text.batch.sequences = 2;
  const std::vector<float> part = gradients(network, text.batch);
  EXPECT_EQ(network.evaluate(text.batch).targets,
            std::count_if(text.targets.begin(), text.targets.begin() + 2 * kSeqlen, [](int32_t t) { return t >= 0; }));
  text.batch.sequences = 3;
  std::fill(text.targets.begin() + 2 * kSeqlen, text.targets.end(), -1);
  const std::vector<float> whole = gradients(network, text.batch);
  for (const Parameter& p : network.parameters())
    EXPECT_TRUE(error_of(part.data() + p.offset, whole.data() + p.offset, static_cast<size_t>(p.size)) <=
                1e-6 * largest(whole.data() + p.offset, p.size))
        << p.name;
}

// Two halves of a batch, one after the other, are the batch.
TEST(NetworkSmallBatch, GradientsAreAdded) {
  const Config config = config_of("gpt2");
  const Beginning start(config);
  const Text first(config, false, 1), second(config, false, 2);
  Network network = start.network(options_of());
  const std::vector<float> a = gradients(network, first.batch), b = gradients(network, second.batch);
  network.zero_gradients();
  network.accumulate(first.batch, 1, 0);
  network.accumulate(second.batch, 1, 1);
  const std::vector<float> both = copy(network, Flat::kGradient);
  for (const Parameter& p : network.parameters())
    for (int64_t i = p.offset; i < p.offset + p.size; ++i) {
      const auto at = static_cast<size_t>(i);
      ASSERT_TRUE(std::fabs(both[at] - (a[at] + b[at])) <= 1e-5 * largest(both.data() + p.offset, p.size)) << p.name;
    }
}

TEST(NetworkSmallBatch, WhatCannotBeIsRefused) {
  const Config config = config_of("gpt2");
  const Beginning start(config);
  Network network = start.network(options_of());
  Text text(config, false);
  Batch batch = text.batch;
  batch.seqlen = 20;
  EXPECT_THROW(network.evaluate(batch), Error);
  text.ids[3] = 131;
  EXPECT_THROW(network.evaluate(text.batch), fattn::Error);
  text.ids[3] = 0, text.targets[3] = -2;
  EXPECT_THROW(network.accumulate(text.batch, 1, 0), fattn::Error);
  EXPECT_THROW(network.update({.step = 0}), Error);
  EXPECT_THROW(network.update({.beta2 = 1}), Error);
  EXPECT_THROW(network.update({.learning_rate = NAN}), Error);
  NetworkOptions options = options_of();
  options.seqlen = 65;
  EXPECT_THROW(start.network(options), Error);
  options = options_of();
  options.dropout = 1;
  EXPECT_THROW(start.network(options), Error);
  EXPECT_THROW(start.network(options_of(), {.gpu = 4096}), fattn::Error);
}

TEST(NetworkSmallUpdate, StopsWhereAGradientIsNotFinite) {
  const Config config = config_of("gpt2");
  const Beginning start(config);
  const Text text(config, false);
  Network network = start.network(options_of());
  std::vector<float> g = gradients(network, text.batch);
  const std::vector<float> before = copy(network, Flat::kMaster);
  const Parameter& bad = network.parameters()[6];
  g[static_cast<size_t>(bad.offset + bad.size - 1)] = INFINITY;
  network.restore(Flat::kGradient, g.data());
  const UpdateResult result = network.update({.learning_rate = 1e-3});
  EXPECT_FALSE(result.finite);
  EXPECT_EQ(result.first_bad, bad.name);
  expect_same(copy(network, Flat::kMaster), before, "nothing was updated");
  std::vector<float> weights = before;
  weights[static_cast<size_t>(network.parameters()[2].offset)] = NAN;
  network.restore(Flat::kMaster, weights.data());
  const LossSum loss = network.evaluate(text.batch);
  EXPECT_TRUE(std::isnan(loss.loss) && std::isnan(loss.logit_scale));
}

// A step against the formula: decay of matrices alone, gradients scaled and clipped.
TEST(NetworkSmallUpdate, IsAdamW) {
  const Config config = config_of("gpt2");
  const Beginning start(config);
  const Text text(config, false);
  Network network = start.network(options_of());
  const std::vector<float> g = gradients(network, text.batch), w = copy(network, Flat::kMaster);
  double squares = 0;
  for (const float x : g) squares += static_cast<double>(x) * x;
  const UpdateResult result = network.update({.learning_rate = 0.01, .weight_decay = 0.3, .step = 1, .gradient_scale = 0.25, .clip = 0.5});
  EXPECT_NEAR(result.gradient_norm, 0.25 * std::sqrt(squares), 1e-6 * result.gradient_norm);
  ASSERT_GT(result.gradient_norm, 0.5);
  const double scale = 0.25 * 0.5 / (result.gradient_norm + 1e-6);
  for (const Parameter& p : network.parameters())
    for (int64_t i = p.offset; i < p.offset + p.size; ++i) {
      const auto at = static_cast<size_t>(i);
      const double gradient = scale * g[at];  // after one step moments divided by 1 - beta are g and g^2
      const double expected = w[at] - 0.01 * (gradient / (std::fabs(gradient) + 1e-8) + (p.shape.size() > 1 ? 0.3 : 0) * w[at]);
      ASSERT_NEAR(network.flat(Flat::kMaster)[i], expected, 2e-6) << p.name;
    }
}

TEST(NetworkSmallUpdate, LearnsByHeart) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    Config config = config_of("gpt2");
    config.initializer_range = 0.05;
    const Beginning start(config);
    const Text text(config, false);
    Network network = start.network(options_of(dtype));
    const double begin = network.evaluate(text.batch).loss;
    for (int64_t step = 1; step <= 60; ++step) {
      network.zero_gradients();
      network.accumulate(text.batch, 1.0 / static_cast<double>(text.batch.target_count), static_cast<uint64_t>(step));
      EXPECT_TRUE(network.update({.learning_rate = 1e-2, .weight_decay = 0, .step = step, .clip = 1}).finite);
    }
    EXPECT_TRUE(network.evaluate(text.batch).loss <= 0.05 * begin) << name_of(dtype) << network.evaluate(text.batch).loss / begin;
  }
}

}  // namespace
}  // namespace fattn::gpt2
