// Networks that share sequences, ranks as threads: losses, gradients and steps are those of one network with whole sequences.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "fattn/error.hpp"
#include "gpt2/error.h"
#include "gpt2/group/share.h"
#include "network_text.h"
#include "ring_of_threads.h"
#include "thrown.h"

namespace fattn::gpt2 {
namespace {

struct Learnt {
  LossSum losses;
  double evaluated = 0;
  std::vector<float> gradients;
};

Learnt learn(Network& network, const Batch& batch) {
  Learnt l;
  network.zero_gradients();
  l.losses = network.accumulate(batch, 0.5, 0);
  l.gradients.assign(network.flat(Flat::kGradient), network.flat(Flat::kGradient) + network.flat_size());
  l.evaluated = network.evaluate(batch).loss;
  return l;
}

// What the ranks have, added.
Learnt learn_together(const Beginning& start, const NetworkOptions& options, const Batch& batch, int ranks, const Compute& compute) {
  std::vector<Learnt> parts(static_cast<size_t>(ranks));
  testing::run_ranks(ranks, true, [&](RingTransport& transport) {
    NetworkOptions own = options;
    own.context = {transport.rank(), ranks, &transport};
    Network network = start.network(own, compute);
    parts[static_cast<size_t>(transport.rank())] = learn(network, batch);
  });
  Learnt sum = parts[0];
  for (size_t r = 1; r < parts.size(); ++r) {
    sum.losses.loss += parts[r].losses.loss;
    sum.losses.targets += parts[r].losses.targets;
    sum.losses.logit_scale = std::max(sum.losses.logit_scale, parts[r].losses.logit_scale);
    sum.evaluated += parts[r].evaluated;
    for (size_t i = 0; i < sum.gradients.size(); ++i) sum.gradients[i] += parts[r].gradients[i];
  }
  return sum;
}

// Of all numbers together, as a share of their size.
double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double apart = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    apart += std::pow(static_cast<double>(a[i]) - b[i], 2);
    size += std::pow(static_cast<double>(b[i]), 2);
  }
  return std::sqrt(apart / size);
}

class ContextSmall : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Variants, ContextSmall, ::testing::Values("gpt2", "rotary", "gqa", "scales", "two_sided", "own_head"),
                         [](const auto& one) { return std::string(one.param); });

// In fp32 what is left is the order of sums. In 16 bits the roundings of the network are larger: what one process has against fp32 says how much.
TEST_P(ContextSmall, IsOneNetwork) {
  Config config = variant(GetParam());
  config.n_layer = 2;
  const Beginning start(config);
  for (const bool documents : {false, true})
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const Text text(config, documents);
      NetworkOptions options = options_of(dtype);
      options.checkpoint_activations = documents;
      const Compute compute{.threads = 1};
      Network whole = start.network(options, compute);
      const Learnt one = learn(whole, text.batch);
      Network exact = start.network(options_of());
      const Learnt truth = learn(exact, text.batch);
      const double rounding = dtype == DType::kF32 ? 1e-6 : distance(one.gradients, truth.gradients);
      for (const int ranks : dtype == DType::kF32 ? std::vector<int>{2, 3, 7} : std::vector<int>{4}) {
        const std::string which = std::string(name_of(dtype)) + (documents ? ", documents, " : ", ") + std::to_string(ranks) + " ranks";
        const Learnt shared = learn_together(start, options, text.batch, ranks, compute);
        EXPECT_EQ(shared.losses.targets, one.losses.targets) << which;
        EXPECT_LE(distance(shared.gradients, one.gradients), 1.5 * rounding) << which;
        const double allowed = dtype == DType::kF32 ? 1e-6 : 1e-3;
        EXPECT_NEAR(shared.losses.loss, one.losses.loss, allowed * one.losses.loss) << which;
        EXPECT_NEAR(shared.evaluated, one.evaluated, allowed * one.evaluated) << which;
        EXPECT_NEAR(shared.losses.logit_scale, one.losses.logit_scale, 10 * allowed * one.losses.logit_scale) << which;
      }
    }
}

// Embeddings, attention and the residual stream drop what one network drops of them: another draw, which drops other elements, is far away.
TEST_P(ContextSmall, DropsWhatOneNetworkDrops) {
  Config config = variant(GetParam());
  config.n_layer = 2;
  const Beginning start(config);
  for (const bool documents : {false, true}) {
    const Text text(config, documents);
    NetworkOptions options = options_of();
    options.dropout = 0.2;
    options.checkpoint_activations = documents;
    const Compute compute{.threads = 1};
    Network whole = start.network(options, compute);
    const Learnt one = learn(whole, text.batch);
    for (const int ranks : {2, 3, 7}) {
      const Learnt shared = learn_together(start, options, text.batch, ranks, compute);
      EXPECT_NEAR(shared.losses.loss, one.losses.loss, 1e-6 * one.losses.loss) << ranks;
      EXPECT_NEAR(shared.evaluated, one.evaluated, 1e-6 * one.evaluated) << ranks;
      EXPECT_LE(distance(shared.gradients, one.gradients), 2e-6) << ranks;
    }
    options.seed += 1;
    Network other = start.network(options, compute);
    EXPECT_GT(distance(learn(other, text.batch).gradients, one.gradients), 0.1);
  }
}

// A batch with fewer sequences than there is room for, and one rank, whose network is the plain one.
TEST(ContextSmall, TakesShortBatches) {
  const Config config = variant("gpt2");
  const Beginning start(config);
  const Text text(config, false);
  Batch batch = text.batch;
  batch.sequences = 2;
  Network whole = start.network(options_of(), {.threads = 1});
  const Learnt one = learn(whole, batch);
  const Learnt shared = learn_together(start, options_of(), batch, 2, {.threads = 1});
  EXPECT_EQ(shared.losses.targets, one.losses.targets);
  EXPECT_LE(distance(shared.gradients, one.gradients), 1e-6);
  EXPECT_EQ(learn_together(start, options_of(), batch, 1, {.threads = 1}).gradients, one.gradients);
}

TEST(ContextSmall, EveryRankHasOtherRows) {
  const Config config = variant("gpt2");
  for (const int ranks : {1, 2, 3, 5, 10}) {
    std::vector<int32_t> all(2 * kSeqlen), seen;
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int32_t>(i);
    for (int rank = 0; rank < ranks; ++rank) {
      const ContextRows rows(config, kSeqlen, {rank, ranks});
      std::vector<int32_t> mine(static_cast<size_t>(2 * rows.count()), -1);
      rows.take(all.data(), 2, mine.data());
      std::vector<int32_t> places(mine.size(), -1);
      rows.places(2, places.data());
      EXPECT_EQ(places, mine);
      EXPECT_TRUE(std::is_sorted(mine.begin(), mine.end()));
      seen.insert(seen.end(), mine.begin(), mine.end());
    }
    std::sort(seen.begin(), seen.end());
    EXPECT_EQ(seen, all) << ranks;
  }
}

// Of one sequence without a target in its second half, and of one with a single target: what each rank counts.
TEST(ContextSmall, TargetsAreThoseOfItsRows) {
  Config config = variant("gpt2");
  config.causal = false;  // parts in order
  std::vector<int32_t> targets(2 * kSeqlen, -1);
  std::fill_n(targets.begin(), kSeqlen / 2, 0);
  targets[2 * kSeqlen - 1] = 1;
  const Beginning start(config);
  Batch batch;
  batch.seqlen = kSeqlen;
  batch.targets = targets.data();
  const auto counted = [&](int rank, int ranks, int64_t sequences) {
    NetworkOptions options = options_of();
    options.context = {rank, ranks};
    batch.sequences = sequences;
    return start.network(options).targets(batch);
  };
  EXPECT_EQ(counted(0, 1, 2), kSeqlen / 2 + 1);
  EXPECT_EQ(counted(0, 2, 2), kSeqlen / 2);
  EXPECT_EQ(counted(1, 2, 2), 1);
  EXPECT_EQ(counted(1, 2, 1), 0);
}

TEST(ContextSmall, WhatCannotBeIsRefused) {
  const Config config = variant("gpt2");
  const Beginning start(config);
  const auto said = [&](int rank, int ranks) {
    return thrown_by(
        [&] {
          NetworkOptions options = options_of();
          options.context = {rank, ranks};
          Network::memory(config, options, {});
        },
        "");
  };
  EXPECT_EQ(said(1, 10), "");
  EXPECT_NE(said(0, 11).find("21 tokens are too short for 11 processes"), std::string::npos) << said(0, 11);
  EXPECT_NE(said(0, 11).find("give at most 10"), std::string::npos);
  EXPECT_NE(said(2, 2).find("rank 2 of 2"), std::string::npos);
  NetworkOptions options = options_of();
  options.context = {0, 2};
  Network network = start.network(options);
  const Text text(config, false);
  EXPECT_NE(thrown_by([&] { network.evaluate(text.batch); }).find("needs what carries rows"), std::string::npos);
}

TEST(ContextSmall, RanksThatFollowEachOtherShareSequences) {
  Launch launch;
  launch.ranks = 6;
  for (int rank = 0; rank < 6; ++rank) {
    launch.rank = rank;
    const Share share = share_of(launch, 3);
    EXPECT_EQ(share.data_rank, rank / 3);
    EXPECT_EQ(share.data_ranks, 2);
    EXPECT_EQ(share.context_rank, rank % 3);
    EXPECT_EQ(share.context_ranks, 3);
    EXPECT_EQ(share.rank_of(share.context_rank), rank);
  }
  EXPECT_NE(thrown_by([&] { share_of(launch, 4); }).find("4 does not divide the number of processes, which is 6; allowed: 1, 2, 3, 6"),
            std::string::npos);
  EXPECT_NE(thrown_by([&] { share_of(launch, 0); }, ""), "");
}

// The memory that is said is what is asked for: activations are those of fewer rows.
TEST(ContextSmall, MemoryIsThatOfItsRows) {
  Config config = variant("gpt2");
  config.n_positions = 512;
  const auto activations = [&](int ranks) {
    NetworkOptions options = options_of();
    options.seqlen = 512;
    options.context = {0, ranks};
    for (const TrainingMemory& use : Network::memory(config, options, {}))
      if (use.what == "activations") return static_cast<double>(use.bytes);
    return 0.0;
  };
  EXPECT_LT(activations(2), 0.51 * activations(1));
  EXPECT_LT(activations(4), 0.26 * activations(1));
}

}  // namespace
}  // namespace fattn::gpt2
