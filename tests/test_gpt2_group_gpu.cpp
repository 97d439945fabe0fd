// The network on GPUs of several processes: a group of one changes no bit, a group of two gives what one process gives that has all batches. In
// processes of their own: the parent never starts CUDA, which no child could use then.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "fattn/device.hpp"
#include "files/input_file.h"
#include "files/whole_file.h"
#include "gpt2/group/group.h"
#include "in_child.h"
#include "network_text.h"
#include "temporary_folder.h"

namespace fattn::gpt2 {
namespace {

using test::in_child;

int gpus() {
  return std::stoi(in_child({}, [] { return std::to_string(cuda::count()); }));
}

Config on_gpu() {
  Config c = variant("gpt2");
  c.n_layer = 3;
  c.n_embd = 64;
  c.n_inner = 200;
  return c;
}

std::vector<float> copy(Network& network, Flat which) {
  const float* numbers = network.flat(which);
  return {numbers, numbers + network.flat_size()};
}

ControlOptions options_of(int rank, int ranks, const std::string& meet) {
  ControlOptions o;
  o.launch.rank = rank;
  o.launch.ranks = ranks;
  o.launch.local_ranks = ranks;
  o.launch.file = meet;
  o.start_timeout = 60;
  return o;
}

// Gradients of two batches and the weights after three steps, of which this rank passes over those that are its own.
std::vector<float> train(Network& network, int rank, int ranks, Group* group) {
  const Config config = on_gpu();
  const Text first(config, true, 1), second(config, true, 2);
  std::vector<float> all;
  for (int64_t step = 1; step <= 3; ++step) {
    network.zero_gradients();
    const double scale = 1.0 / static_cast<double>(first.batch.target_count + second.batch.target_count);
    std::vector<const Batch*> mine;
    for (int i = rank; i < 2; i += ranks) mine.push_back(i == 0 ? &first.batch : &second.batch);
    for (size_t i = 0; i < mine.size(); ++i)
      network.pass(*mine[i], scale, static_cast<uint64_t>(2 * step) + i * static_cast<uint64_t>(ranks) + static_cast<uint64_t>(rank),
                   group && i + 1 == mine.size() ? &group->gradients() : nullptr);
    if (step == 1) all = copy(network, Flat::kGradient);
    network.update({.learning_rate = 1e-3, .step = step, .clip = 1});
  }
  const std::vector<float> weights = copy(network, Flat::kMaster);
  all.insert(all.end(), weights.begin(), weights.end());
  return all;
}

template <class Body>
std::string words_of(const Body& body) {
  try {
    return body();
  } catch (const std::exception& e) {
    return e.what();
  }
}

TEST(GroupGpu, OneRankChangesNoBit) {
  if (gpus() < 1) GTEST_SKIP() << "there is no GPU";
  const test::TemporaryFolder folder;
  for (const int64_t bucket : {int64_t{4}, int64_t{1} << 30})
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const std::string said = in_child({}, [&] {
        return words_of([&]() -> std::string {
          const Beginning start(on_gpu());
          NetworkOptions options = gpt2::options_of(dtype);
          options.dropout = 0.1;
          options.deterministic = true;
          Network plain = start.network(options, {.gpu = 0}), grouped = start.network(options, {.gpu = 0});
          Group group(options_of(0, 1, (folder.path() / "meet").string()));
          group.connect({.gpu = 0}, bucket);
          const std::vector<float> a = train(plain, 0, 1, nullptr), b = train(grouped, 0, 1, &group);
          return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0 ? "the same" : "not the same";
        });
      });
      EXPECT_EQ(said, "the same") << name_of(dtype) << ", buckets of " << bucket;
    }
}

// Two processes that take batches in turns, or that share their sequences.
void two_ranks_give_what_one_gives(bool share_sequences) {
  if (gpus() < 2) GTEST_SKIP() << "there are less than two GPUs";
  const test::TemporaryFolder folder;
  const auto path = [&](int i) { return (folder.path() / std::to_string(i)).string(); };
  const auto write = [&](int i, const std::vector<float>& numbers) {
    files::WholeFile file(path(i));
    file.write(numbers.data(), numbers.size() * sizeof(float));
    file.publish();
  };
  NetworkOptions options = gpt2::options_of(DType::kF32);
  options.deterministic = true;
  options.dropout = share_sequences ? 0.1 : 0;
  const auto answers = test::in_children(3, [&](int i) {  // the last one is alone
    return words_of([&]() -> std::string {
      const Beginning start(on_gpu());
      const int gpu = i % 2;
      if (i == 2) {
        Network network = start.network(options, {.gpu = gpu});
        write(i, train(network, 0, 1, nullptr));
        return "fine";
      }
      Group group(options_of(i, 2, (folder.path() / "meet").string()));
      NetworkOptions own = options;
      if (share_sequences) {
        group.share({i, 2, 0, 1});
        own.context = {i, 2, &group.context()};
      }
      Network network = start.network(own, {.gpu = gpu});
      group.connect({.gpu = gpu}, 1000);
      write(i, train(network, group.share().data_rank, group.share().data_ranks, &group));
      group.control().finish();
      return "fine";
    });
  });
  ASSERT_EQ(answers, (std::vector<std::string>{"fine", "fine", "fine"}));
  std::string numbers[3];
  for (int i = 0; i < 3; ++i) numbers[i] = files::read_whole(path(i), uint64_t{1} << 30);
  EXPECT_EQ(numbers[0], numbers[1]) << "both ranks have the same bits";
  ASSERT_EQ(numbers[0].size(), numbers[2].size());
  const size_t count = numbers[0].size() / sizeof(float);
  double error = 0, scale = 0;
  for (size_t i = 0; i < count / 2; ++i) {  // of gradients: two sums of the same numbers in another order
    float a = 0, b = 0;
    std::memcpy(&a, numbers[0].data() + i * sizeof a, sizeof a);
    std::memcpy(&b, numbers[2].data() + i * sizeof b, sizeof b);
    error = std::max(error, static_cast<double>(std::fabs(a - b)));
    scale = std::max(scale, static_cast<double>(std::fabs(b)));
  }
  EXPECT_TRUE(scale > 0 && error <= 1e-5 * scale) << error << " of " << scale;
}

TEST(GroupGpu, TwoRanksGiveWhatOneProcessGives) { two_ranks_give_what_one_gives(false); }
TEST(GroupGpu, TwoRanksThatShareSequencesGiveWhatOneProcessGives) { two_ranks_give_what_one_gives(true); }

}  // namespace
}  // namespace fattn::gpt2
