// Who a process is, as its starter says; parts of gradients that are handed over; NCCL opened at run time.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "device/nccl.h"
#include "gpt2/data/batch.h"
#include "gpt2/error.h"
#include "gpt2/group/group.h"
#include "gpt2/group/launch.h"
#include "gpt2/train/network.h"
#include "gpt2/weights/weights.h"
#include "in_child.h"
#include "temporary_folder.h"
#include "thrown.h"

namespace {

using namespace fattn::gpt2;
using fattn::test::in_child;
using fattn::test::thrown_by;

using Variables = std::map<std::string, std::string>;

Launch launch(const Variables& variables, const std::string& rendezvous = "") {
  return launch_from([&](const char* name) { return variables.count(name) ? variables.at(name).c_str() : nullptr; }, rendezvous);
}

void expect_contains(const std::string& text, const std::string& part) { EXPECT_NE(text.find(part), std::string::npos) << "in: " << text; }

TEST(Gpt2GroupSmall, EveryStarterSaysTheRank) {
  EXPECT_FALSE(launch({}).several());
  EXPECT_FALSE(launch({{"RANK", "0"}, {"WORLD_SIZE", "1"}}).several());
  const Variables by_starter[] = {
      {{"RANK", "2"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "2"}},
      {{"OMPI_COMM_WORLD_RANK", "2"}, {"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}},
      {{"PMI_RANK", "2"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}},
      {{"SLURM_PROCID", "2"}, {"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_LOCALID", "1"}},
  };
  for (Variables variables : by_starter) {
    variables["MASTER_ADDR"] = "host";
    variables["MASTER_PORT"] = "29500";
    const Launch l = launch(variables);
    EXPECT_EQ(l.rank, 2) << l.by;
    EXPECT_EQ(l.ranks, 4) << l.by;
    EXPECT_EQ(l.local_rank, 1) << l.by;
    EXPECT_EQ(l.host, "host");
    EXPECT_EQ(l.port, 29501);
  }
  EXPECT_FALSE(launch({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}}).several()) << "a batch script, of which no step is under way";
}

TEST(Gpt2GroupSmall, WhereProcessesMeet) {
  const Variables two = {{"RANK", "1"}, {"WORLD_SIZE", "2"}};
  EXPECT_EQ(launch(two, "[::1]:4000").host, "::1");
  EXPECT_EQ(launch(two, "[::1]:4000").port, 4000);
  EXPECT_EQ(launch(two, "host:4000").host, "host");
  EXPECT_EQ(launch(two, "/shared/meet").file, "/shared/meet");
  EXPECT_EQ(launch(two, "/shared/a:4000").file, "/shared/a:4000");
  EXPECT_EQ(launch(two, "meet").file, "meet");
  expect_contains(thrown_by([&] { launch(two, "host:70000"); }), "port from 1 to 65535");
  expect_contains(thrown_by([&] { launch(two, ":4000"); }), "is no place to meet");
  expect_contains(thrown_by([&] { launch(two); }), "one of 2 processes (RANK)");
  expect_contains(thrown_by([&] { launch({{"RANK", "1"}}); }), "WORLD_SIZE is not");
  expect_contains(thrown_by([&] { launch({{"RANK", "-1"}, {"WORLD_SIZE", "2"}}); }), "RANK is '-1'; allowed: 0 to 1");
  expect_contains(thrown_by([&] { launch({{"RANK", "1x"}, {"WORLD_SIZE", "2"}}); }), "RANK is '1x'");
}

// What the network hands over, and when.
class Parts final : public GradientExchange {
 public:
  void ready(float* gradients, int64_t begin, int64_t end, void*) override {
    EXPECT_LE(begin, end);
    parts.emplace_back(gradients + begin, gradients + end);
    places.emplace_back(begin, end);
  }
  void finish(void*) override { ++finished; }

  std::vector<std::vector<float>> parts;
  std::vector<std::pair<int64_t, int64_t>> places;
  int finished = 0;
};

// All of the gradients, once, as they are in the end; the last layer's first. Tied and untied heads, learned positions and none.
TEST(Gpt2GroupSmall, GradientsAreHandedOverWhenTheyAreFinal) {
  for (const bool tied : {true, false})
    for (const Positions positions : {Positions::kLearned, Positions::kRotary}) {
      Config c = preset("gpt2");
      c.n_layer = 3;
      c.n_head = c.n_kv_head = 2;
      c.n_embd = 16;
      c.n_inner = 40;
      c.n_positions = 8;
      c.vocab_size = 50;
      c.bos_token_id = c.eos_token_id = 49;
      c.tied_head = tied;
      c.positions = positions;
      NetworkOptions o;
      o.sequences = 2;
      o.seqlen = 8;
      Network network(c, Weights::at_random(c, 1), o, {});
      std::vector<int32_t> ids(16), targets(16), places(16);
      for (int i = 0; i < 16; ++i) {
        ids[static_cast<size_t>(i)] = i * 3 % 50;
        targets[static_cast<size_t>(i)] = i * 7 % 50;
        places[static_cast<size_t>(i)] = i % 8;
      }
      const Batch batch{2, 8, ids.data(), targets.data(), places.data(), nullptr, 16};
      Parts parts;
      network.zero_gradients();
      network.accumulate(batch, 1, 0);
      network.pass(batch, 1, 1, &parts);
      EXPECT_EQ(parts.finished, 1);
      const float* all = network.flat(Flat::kGradient);
      std::vector<int> covered(static_cast<size_t>(network.flat_size()));
      for (size_t i = 0; i < parts.parts.size(); ++i) {
        for (int64_t at = parts.places[i].first; at < parts.places[i].second; ++at) ++covered[static_cast<size_t>(at)];
        EXPECT_EQ(std::memcmp(parts.parts[i].data(), all + parts.places[i].first, parts.parts[i].size() * sizeof(float)), 0) << "part " << i;
      }
      EXPECT_EQ(std::accumulate(covered.begin(), covered.end(), 0), network.flat_size());
      EXPECT_EQ(*std::min_element(covered.begin(), covered.end()), 1);
      ASSERT_GE(parts.places.size(), 4u);
      for (size_t i = 0; i < 3; ++i) {
        const std::string name = "h." + std::to_string(2 - i) + ".";
        for (const Parameter& p : network.parameters())
          if (p.decays && p.name.compare(0, name.size(), name) == 0) {
            EXPECT_GE(p.offset, parts.places[i].first) << p.name;
            EXPECT_LE(p.offset + p.size, parts.places[i].second) << p.name;
          }
      }
    }
}

// Ranks as threads: what each brings comes to all, in the order of ranks, also where it is much; the first difference is named.
TEST(Gpt2GroupSmall, ExchangesBringEverythingToAll) {
  const fattn::test::TemporaryFolder folder;
  constexpr int kRanks = 4;
  std::vector<std::string> said(kRanks);
  std::vector<std::thread> threads;
  threads.reserve(kRanks);
  for (int rank = 0; rank < kRanks; ++rank)
    threads.emplace_back([&, rank] {
      said[static_cast<size_t>(rank)] = thrown_by([&] {
        ControlOptions o;
        o.launch = launch({{"RANK", std::to_string(rank)}, {"WORLD_SIZE", std::to_string(kRanks)}, {"LOCAL_WORLD_SIZE", std::to_string(kRanks)}},
                          (folder.path() / "meet").string());
        o.start_timeout = 30;
        Group group(o);
        for (size_t n : {size_t{0}, size_t{1}, size_t{200'000}}) {
          const auto all = group.all(std::vector<double>(n, rank + 0.5));
          ASSERT_EQ(all.size(), static_cast<size_t>(kRanks));
          for (int r = 0; r < kRanks; ++r) ASSERT_EQ(all[static_cast<size_t>(r)], std::vector<double>(n, r + 0.5));
        }
        for (int i = 0; i < 200; ++i) ASSERT_EQ(group.all({static_cast<double>(i)})[3][0], i);
        group.agree({{"--batch", "2"}, {"a fact", ""}});
        group.agree({{"--batch", "2"}, {"--seqlen", rank == 2 ? "9" : "8"}});
      });
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& text : said) EXPECT_EQ(text, "rank 2 has --seqlen 9, rank 0 has --seqlen 8; all processes of a run must have the same");
}

TEST(Gpt2Group, NcclIsOpenedByName) {
  const auto reason = [] { return fattn::core::nccl() ? "opened " + fattn::core::nccl().path : fattn::core::nccl().reason; };
  EXPECT_EQ(in_child({{"FATTN_NCCL", FATTN_STUB_NCCL_PATH}}, reason), std::string("opened ") + FATTN_STUB_NCCL_PATH);
  const std::string missing = in_child({{"FATTN_NCCL", "/nonexistent/libnccl.so.2"}}, reason);
  expect_contains(missing, "Tried /nonexistent/libnccl.so.2: ");
  expect_contains(missing, "FATTN_NCCL");
  expect_contains(in_child({{"FATTN_NCCL", "./libnccl.so.2"}}, reason), "a relative path is not opened");
  expect_contains(in_child({{"FATTN_NCCL", "libm.so.6"}}, reason), "it has no function ncclGetVersion");
}

TEST(Gpt2Group, ErrorsOfNcclAreWords) {
  const std::string said = in_child({{"FATTN_NCCL", FATTN_STUB_NCCL_PATH}}, [] { return thrown_by([] { fattn::core::nccl_check(6, "a sum"); }); });
  expect_contains(said, "NCCL 2.14.0: a sum failed: remote process exited (6): the stub says no more; NCCL_DEBUG=INFO");
  EXPECT_EQ(in_child({{"FATTN_NCCL", FATTN_STUB_NCCL_PATH}}, [] { return thrown_by([] { fattn::core::nccl_check(7, "a sum"); }, ""); }), "");
}

}  // namespace
