// Verdicts on synthetic times, whose truth is known; which rows belong together; what is not compared.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "lab/regress.h"

namespace fattn::lab {
namespace {

// Times of a program: a level, noise of each sample, and what a whole turn has in common.
struct Program {
  double seconds = 1e-3, noise = 0.01, turn_noise = 0;
  bool heavy_tails = false;
};

class Machine {
 public:
  explicit Machine(uint64_t seed) : random_(seed) {}

  TimeOfRow measure(const Program& program, int turns, int samples_a_turn) {
    TimeOfRow time;
    for (int t = 0; t < turns; ++t) {
      const double drift = program.turn_noise * normal_(random_);
      std::vector<double> turn;
      for (int i = 0; i < samples_a_turn; ++i) {
        double noise = program.noise * normal_(random_);
        if (program.heavy_tails && uniform_(random_) < 0.1) noise = std::abs(20 * noise);
        turn.push_back(program.seconds * std::exp(noise + drift));
      }
      time.turn_medians.push_back(median_of(turn));
      time.turns.push_back(turn);
    }
    time.median = median_of(time.turn_medians);
    return time;
  }

 private:
  std::mt19937_64 random_;
  std::normal_distribution<double> normal_;
  std::uniform_real_distribution<double> uniform_;
};

struct Counts {
  int worse = 0, better = 0, same = 0, undecided = 0;
};

Counts count(const Program& was, const Program& is, int turns, int samples_a_turn, double margin, int pairs = 1000, bool forget_samples = false) {
  Machine machine(20261128);
  Counts counts;
  for (int i = 0; i < pairs; ++i) {
    TimeOfRow a = machine.measure(was, turns, samples_a_turn), b = machine.measure(is, turns, samples_a_turn);
    if (forget_samples) a.turns.clear(), b.turns.clear();
    const TimeChange change = change_of(a, b, false, 0.99);
    const Verdict verdict = change.interval ? verdict_of(*change.interval, margin) : Verdict::kUndecided;
    ++(verdict == Verdict::kWorse    ? counts.worse
       : verdict == Verdict::kBetter ? counts.better
       : verdict == Verdict::kSame   ? counts.same
                                     : counts.undecided);
  }
  return counts;
}

// Of 1,000 pairs at 1 % each, as many as this are seen once in a thousand times.
constexpr int kOneInAHundred = 20;

TEST(LabRegress, OfAProgramAgainstItselfAtMostOneInAHundredIsAFalseAlarm) {
  for (const bool heavy : {false, true})
    for (const int samples : {2, 8}) {
      const Program program{1e-3, 0.01, 0, heavy};
      const Counts counts = count(program, program, 5, samples, 0.01), strict = count(program, program, 5, samples, 0);
      EXPECT_LE(counts.worse, 10) << heavy << " " << samples;
      EXPECT_LE(counts.better, 10) << heavy << " " << samples;
      EXPECT_LE(strict.worse, kOneInAHundred) << heavy << " " << samples;  // whatever the margin: the bound is what it says
      EXPECT_LE(strict.better, kOneInAHundred) << heavy << " " << samples;
      EXPECT_GT(strict.worse + strict.better, 0) << heavy << " " << samples;
    }
}

TEST(LabRegress, ThreePerCentAtOnePerCentOfNoiseIsFoundWithTenSamples) {
  const Program was, slower{1.03e-3}, faster{1e-3 / 1.03};
  EXPECT_GE(count(was, slower, 5, 2, 0.01, 10000).worse, 9500);
  EXPECT_GE(count(was, faster, 5, 2, 0.01, 10000).better, 9500);
}

TEST(LabRegress, WhatATurnHasInCommonIsNoEvidence) {
  // Samples scatter by 0.2 %, turns by 2 %: forty samples are five observations.
  const Program program{1e-3, 0.002, 0.02};
  const Counts counts = count(program, program, 5, 8, 0);
  EXPECT_LE(counts.worse, kOneInAHundred);
  EXPECT_LE(counts.better, kOneInAHundred);
}

TEST(LabRegress, AVerdictOfSameIsTrue) {
  // Just beyond the margin it may not be called same in more than one of a hundred; well within it is found.
  const Program was{1e-3, 0.004}, beyond{1.0101e-3, 0.004}, within{1.001e-3, 0.004};
  EXPECT_LE(count(was, beyond, 5, 8, 0.01).same, kOneInAHundred);
  EXPECT_GE(count(was, within, 5, 8, 0.01).same, 990);
}

TEST(LabRegress, OlderRecordsHaveMediansOfTurns) {
  const Program was, slower{1.03e-3, 0.003};
  EXPECT_LE(count(was, was, 5, 4, 0, 1000, true).worse, kOneInAHundred);
  EXPECT_GE(count({1e-3, 0.003}, slower, 5, 4, 0.01, 1000, true).worse, 990);
}

TEST(LabRegress, PairedTurnsTakeAwayWhatTheyShare) {
  Machine machine(7);
  int paired = 0, apart = 0, false_alarms = 0;
  for (int i = 0; i < 200; ++i) {
    TimeOfRow was = machine.measure({1e-3, 0.01}, 5, 8), is = machine.measure({1.03e-3, 0.01}, 5, 8), again = machine.measure({1e-3, 0.01}, 5, 8);
    for (size_t t = 0; t < 5; ++t)  // the machine slows down by 40 % while it runs
      for (TimeOfRow* time : {&was, &is, &again}) {
        for (double& s : time->turns[t]) s *= 1 + 0.1 * static_cast<double>(t);
        time->turn_medians[t] *= 1 + 0.1 * static_cast<double>(t);
      }
    const TimeChange together = change_of(was, is, true, 0.99), alone = change_of(was, is, false, 0.99);
    EXPECT_TRUE(together.paired && !alone.paired && alone.by_turns);
    paired += verdict_of(*together.interval, 0.01) == Verdict::kWorse;
    apart += verdict_of(*alone.interval, 0.01) == Verdict::kWorse;
    false_alarms += verdict_of(*change_of(was, again, true, 0.99).interval, 0) == Verdict::kWorse;
  }
  EXPECT_GE(paired, 190);
  EXPECT_LE(apart, 20);
  EXPECT_LE(false_alarms, 4);
}

TEST(LabRegressSmall, RanksGiveTheIntervalOfTheTables) {
  // Of 5 and 5 samples U may be 0 or 1 in 2 of 252 ways: the second ratios from the ends.
  const auto interval = ratio_interval({{{1, 1, 1, 1, 1}, {2, 3, 5, 7, 11}}}, 0.99);
  ASSERT_TRUE(interval);
  EXPECT_EQ(interval->low, 2);
  EXPECT_EQ(interval->high, 11);
  EXPECT_EQ(interval->ratio, 5);
  // 10 and 10: the table's critical value is 19, so the twentieth.
  std::vector<double> powers;
  for (int i = 0; i < 10; ++i) powers.push_back(std::exp(i * 1.0));
  const auto ten = ratio_interval({{{1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, powers}}, 0.99);
  EXPECT_EQ(ten->low, powers[1]);
  EXPECT_FALSE(ratio_interval({{{1, 2, 3, 4}, {1, 2, 3, 4}}}, 0.99));  // 1 of 70
  EXPECT_FALSE(ratio_interval({{{1}, {2}}, {{1}, {2}}, {{1}, {2}}, {{1}, {2}}, {{1}, {2}}}, 0.99));
  EXPECT_FALSE(ratio_interval({}, 0.99));
  EXPECT_FALSE(ratio_interval({{{}, {1, 2, 3, 4, 5, 6}}}, 0.99));
}

TEST(LabRegressSmall, SwappedRecordsHaveSwappedVerdicts) {
  Machine machine(3);
  for (int i = 0; i < 50; ++i) {
    const TimeOfRow a = machine.measure({1e-3}, 5, 3), b = machine.measure({1e-3 * (1 + 0.001 * i)}, 5, 3);
    const RatioInterval one = *change_of(a, b, false, 0.99).interval, other = *change_of(b, a, false, 0.99).interval;
    EXPECT_NEAR(one.low * other.high, 1, 1e-12);
    const Verdict v = verdict_of(one, 0.01), w = verdict_of(other, 0.01);
    EXPECT_EQ(v == Verdict::kWorse, w == Verdict::kBetter);
    EXPECT_EQ(v == Verdict::kSame, w == Verdict::kSame);
  }
}

// Records, as small as they can be.
Json row(const char* provider, const char* status, double seconds = 1e-3, double bytes = 1 << 24) {
  Json json = {{"batch", 1},         {"seqlen_q", 64},       {"seqlen_k", 64},
               {"nheads", 2},        {"nheads_k", 2},        {"headdim", 64},
               {"headdim_v", 64},    {"causal", false},      {"dtype", "fp32"},
               {"pass", "fwd"},      {"provider", provider}, {"algorithm", "v2"},
               {"device", "cuda:0"}, {"status", status},     {"reason", std::string(status) == "ok" ? Json(nullptr) : Json("because")}};
  if (std::string(status) != "ok") return json;
  Json turns = Json::array(), medians = Json::array();
  for (int t = 0; t < 5; ++t) turns.push_back({seconds * (1 + 1e-4 * t), seconds * (1 - 1e-4 * t)}), medians.push_back(seconds);
  json.update({{"time_median_s", seconds},
               {"time_ci_low_s", seconds},
               {"time_ci_high_s", seconds},
               {"time_turn_medians_s", medians},
               {"time_turn_samples_s", turns},
               {"extra_bytes", bytes},
               {"extra_bytes_method", "allocated"},
               {"sm_clock_mhz", 1980}});
  return json;
}

MeasuredRecord record(const Json& rows, const Json& changes = Json::array(), const char* flag = "64") {
  Json json = {
      {"fattn_record", 1},
      {"command", "bench"},
      {"flags", {"--seqlen", flag, "--repeats", flag}},
      {"environment", {{"date", flag}, {"cpu", {{"model", "A"}, {"usable_threads", 2}}}, {"gpus", {{{"name", "G"}, {"clock_khz_max", 1980000}}}}}},
      {"peaks", {{"before", {{"device", "cuda:0"}, {"fma_flops_per_s", 1e12}}}, {"after", {{"device", "cuda:0"}, {"fma_flops_per_s", 1e12}}}}},
      {"summary", nullptr},
      {"rows", rows}};
  return measured_record(json.patch(changes), "test.json");
}

Verdict only(const Json& was, const Json& is, const RegressOptions& options = {}) {
  const MeasuredRecord a = record(Json::array({was})), b = record(Json::array({is}), Json::array(), "65");
  const std::vector<RowVerdict> rows = regress(a, b, options);
  EXPECT_EQ(rows.size(), 1u);
  return rows.front().verdict;
}

TEST(LabRegressSmall, RowsWithoutTimes) {
  EXPECT_EQ(only(row("fattn", "ok"), row("fattn", "ok")), Verdict::kSame);
  EXPECT_EQ(only(row("fattn", "ok"), row("fattn", "ok", 1.02e-3)), Verdict::kWorse);
  EXPECT_EQ(only(row("fattn", "ok"), row("fattn", "ok", 0.98e-3)), Verdict::kBetter);
  EXPECT_EQ(only(row("fattn", "ok"), row("fattn", "check_failed")), Verdict::kWorse);
  EXPECT_EQ(only(row("fattn", "ok"), row("fattn", "refused")), Verdict::kWorse);
  EXPECT_EQ(only(row("fattn", "ok"), row("fattn", "unavailable")), Verdict::kVanished);
  EXPECT_EQ(only(row("fattn", "out_of_memory"), row("fattn", "ok")), Verdict::kBetter);
  EXPECT_EQ(only(row("fattn", "unavailable"), row("fattn", "ok")), Verdict::kAppeared);
  EXPECT_EQ(only(row("fattn", "timeout"), row("fattn", "failed")), Verdict::kFailed);
  EXPECT_EQ(only(row("fattn", "ok"), row("fattn", "ok", 0.9e-3, 2 << 24)), Verdict::kWorse) << "twice the memory";
}

TEST(LabRegressSmall, OtherContestantsMayNeedMoreMemory) {
  RegressOptions options;
  options.match = {{"v1:v2", "v2"}};
  EXPECT_EQ(only(row("v1", "ok"), row("v2", "ok", 0.9e-3, 2 << 24), options), Verdict::kBetter);
}

TEST(LabRegressSmall, RowsThatHaveNoPartner) {
  Json longer = row("fattn", "ok");
  longer["seqlen_q"] = longer["seqlen_k"] = 128;
  const MeasuredRecord was = record({row("fattn", "ok"), row("standard", "ok")}), is = record({row("fattn", "ok"), longer});
  const std::vector<RowVerdict> rows = regress(was, is, {});
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[1].verdict, Verdict::kAppeared);
  EXPECT_EQ(rows[2].verdict, Verdict::kVanished);
  EXPECT_EQ(rows[2].baseline->label, "standard:v2");
  EXPECT_THROW(regress(record(Json::array({row("fattn", "ok")})), record(Json::array({longer})), {}), RecordError);
}

TEST(LabRegressSmall, ClocksOfRows) {
  Json slow = row("fattn", "ok", 1.2e-3);
  slow["sm_clock_mhz"] = 1600;
  EXPECT_EQ(only(row("fattn", "ok"), slow), Verdict::kUndecided);
  RegressOptions across;
  across.across_clocks = true;
  EXPECT_EQ(only(row("fattn", "ok"), slow, across), Verdict::kWorse);
}

TEST(LabRegressSmall, ContestantsOfOneRecordAreComparedTurnByTurn) {
  Json v2 = row("v2", "ok"), v3 = row("v3", "ok", 0.9e-3);
  const MeasuredRecord race = record({v2, v3, row("fattn", "ok")});
  RegressOptions options;
  options.match = {{"v2:v2", "v3:v2"}};
  EXPECT_THROW(regress(race, race, options), RecordError);  // no such names
  options.match = {{"v2", "v3:v2"}};
  const std::vector<RowVerdict> rows = regress(race, race, options);
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0].verdict, Verdict::kBetter);
  EXPECT_TRUE(rows[0].time.paired);
}

TEST(LabRegressSmall, WhatIsNotComparedUnlessToldTo) {
  const Json rows = Json::array({row("fattn", "ok")});
  const MeasuredRecord was = record(rows);
  const auto found = [&](const MeasuredRecord& is, const RegressOptions& options = {}) { return obstacles(was, is, options); };
  const auto replaced = [](const char* path, const Json& value) { return Json{{{"op", "replace"}, {"path", path}, {"value", value}}}; };
  EXPECT_TRUE(found(record(rows, Json::array())).empty());
  const MeasuredRecord machine = record(rows, replaced("/environment/cpu/model", "B"));
  ASSERT_EQ(found(machine).size(), 1u);
  EXPECT_NE(found(machine)[0].find("--across-machines"), std::string::npos);
  RegressOptions across;
  across.across_machines = true;
  EXPECT_TRUE(found(machine, across).empty());
  const MeasuredRecord flags = record(rows, Json::array(), "65");  // --repeats is no other measurement, --seqlen is
  ASSERT_EQ(found(flags).size(), 1u);
  EXPECT_NE(found(flags)[0].find("--seqlen was 64, is 65 (--across-flags"), std::string::npos);
  EXPECT_EQ(found(record(rows, replaced("/peaks/before/fma_flops_per_s", 1.02e12))).size(), 0u);
  const MeasuredRecord clock = record(rows, replaced("/peaks/before/fma_flops_per_s", 1.2e12));
  ASSERT_EQ(found(clock).size(), 1u);
  EXPECT_NE(found(clock)[0].find("--across-clocks"), std::string::npos);
  EXPECT_EQ(found(record(rows, replaced("/environment/gpus/0/clock_khz_max", 1755000))).size(), 1u);
}

TEST(LabRegressSmall, RecordsThatAreNone) {
  const auto replaced = [](const char* path, const Json& value) { return Json{{{"op", "add"}, {"path", path}, {"value", value}}}; };
  const Json rows = Json::array({row("fattn", "ok")});
  EXPECT_THROW(record(Json::array(), Json::array()), RecordError);
  for (const auto& [path, value] : std::vector<std::pair<const char*, Json>>{{"/fattn_record", 2},
                                                                             {"/fattn_record", "1"},
                                                                             {"/rows/0/time_median_s", "fast"},
                                                                             {"/rows/0/time_median_s", -1},
                                                                             {"/rows/0/time_median_s", nullptr},
                                                                             {"/rows/0/time_ci_low_s", 2},
                                                                             {"/rows/0/seqlen_q", 1.5},
                                                                             {"/rows/0/time_turn_samples_s", {1, 2}},
                                                                             {"/rows/0/time_turn_samples_s", {{1e-3, 0}}},
                                                                             {"/rows/0/provider", 3},
                                                                             {"/rows/0", "a row"},
                                                                             {"/rows", 3},
                                                                             {"/environment", "here"}}) {
    try {
      record(rows, replaced(path, value));
      ADD_FAILURE() << path << " " << value;
    } catch (const RecordError& error) {
      EXPECT_EQ(std::string(error.what()).rfind("'test.json'", 0), 0u) << error.what();
    }
  }
}

}  // namespace
}  // namespace fattn::lab
