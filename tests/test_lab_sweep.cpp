// Sweeps without measuring: fits against known data, values and problems, comparisons, sentences, figures, resuming.
#include <gtest/gtest.h>

#include <cmath>
#include <stdexcept>

#include "lab/power_law.h"
#include "lab/sweep/axis.h"
#include "lab/sweep/figures.h"
#include "lab/sweep/presets.h"
#include "lab/sweep/resume.h"
#include "lab/sweep/sweep.h"

namespace fattn::lab {
namespace {

using nlohmann::ordered_json;

std::string what_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}
bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(LabPowerLawSmall, ExactData) {
  const auto law = fit_power_law({{256, 3 * 256.0 * 256.0}, {512, 3 * 512.0 * 512.0}, {4096, 3 * 4096.0 * 4096.0}});
  ASSERT_TRUE(law);
  EXPECT_NEAR(law->exponent, 2, 1e-12);
  EXPECT_NEAR(law->factor, 3, 1e-9);
  EXPECT_NEAR(law->low, 2, 1e-6);
  EXPECT_NEAR(law->high, 2, 1e-6);
  EXPECT_EQ(law->points, 3U);
}

// By hand: log2 of x is 0, 1, 2, 3, of y 0, 2.2, 3.8, 6.4; slope 2.08, residuals -0.02, 0.1, -0.38, 0.14... worked out with the textbook's formulas.
TEST(LabPowerLawSmall, TheIntervalIsTheTextbooks) {
  std::vector<std::pair<double, double>> points;
  const double ys[] = {0, 2.2, 3.8, 6.4};
  for (int i = 0; i < 4; ++i) points.emplace_back(std::exp2(i), std::exp2(ys[i]));
  const auto law = fit_power_law(points);
  ASSERT_TRUE(law);
  const double slope = (-1.5 * 0 + -0.5 * 2.2 + 0.5 * 3.8 + 1.5 * 6.4) / 5;  // 2.08
  double squares = 0;
  for (int i = 0; i < 4; ++i) squares += std::pow(ys[i] - 3.1 - slope * (i - 1.5), 2);
  EXPECT_NEAR(law->exponent, slope, 1e-9);
  EXPECT_NEAR(law->high - law->exponent, 4.3027 * std::sqrt(squares / 2 / 5), 1e-4);
  EXPECT_NEAR(law->exponent - law->low, law->high - law->exponent, 1e-9);
}

TEST(LabPowerLawSmall, TheIntervalHoldsTheTruthAsOftenAsItSays) {
  int inside = 0;
  constexpr int kTrials = 2000;
  uint64_t state = 1;
  const auto uniform = [&] {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    return static_cast<double>(state >> 11) / 9007199254740992.0;
  };
  for (int trial = 0; trial < kTrials; ++trial) {
    std::vector<std::pair<double, double>> points;
    for (int i = 0; i < 5; ++i) {
      const double normal = std::sqrt(-2 * std::log(1 - uniform())) * std::cos(2 * M_PI * uniform());
      const double x = std::exp2(8 + i);
      points.emplace_back(x, std::pow(x, 1.9) * std::exp(0.1 * normal));
    }
    const auto law = fit_power_law(points);
    ASSERT_TRUE(law);
    inside += law->low <= 1.9 && 1.9 <= law->high ? 1 : 0;
  }
  EXPECT_NEAR(inside / static_cast<double>(kTrials), 0.95, 0.02);
}

TEST(LabPowerLawSmall, NotOfTooFewPoints) {
  EXPECT_FALSE(fit_power_law({}));
  EXPECT_FALSE(fit_power_law({{1, 1}, {2, 4}}));
  EXPECT_FALSE(fit_power_law({{1, 1}, {2, 4}, {2, 5}, {2, 6}}));
  EXPECT_FALSE(fit_power_law({{1, 1}, {2, 4}, {4, std::nan("")}, {0, 1}, {8, 0}}));
}

TEST(LabPowerLawSmall, StudentsT) {
  EXPECT_NEAR(student_t(1), 12.706, 1e-3);
  EXPECT_NEAR(student_t(10), 2.228, 1e-3);
  EXPECT_NEAR(student_t(40), 2.0211, 1e-3);
  EXPECT_NEAR(student_t(120), 1.9799, 1e-3);
  EXPECT_TRUE(std::isinf(student_t(0)));
}

TEST(LabSweepSmall, Values) {
  using Values = std::vector<int64_t>;
  EXPECT_EQ(values_by_factor(256, 2048, 2), (Values{256, 512, 1024, 2048}));
  EXPECT_EQ(values_by_factor(256, 2000, 2), (Values{256, 512, 1024}));
  EXPECT_EQ(values_by_factor(1, 5, 1.3), (Values{1, 2, 3, 4, 5}));
  EXPECT_EQ(values_by_factor(7, 7, 2), (Values{7}));
  EXPECT_EQ(values_by_step(1, 10, 4), (Values{1, 5, 9}));
  EXPECT_EQ(values_in("64,32,1"), (Values{64, 32, 1}));
  for (const char* wrong : {"", ",", "1,", "a", "1,b", "1;2", "-1", "1.5", "1e3", "99999999999999999999", "4,4"})
    EXPECT_NE(what_of([&] { values_in(wrong); }), "") << wrong;
  EXPECT_TRUE(has(what_of([] { values_by_factor(4, 2, 2); }), "--to 2 is less than --from 4"));
  EXPECT_TRUE(has(what_of([] { values_by_factor(1, 2, 1); }), "does not grow"));
  EXPECT_TRUE(has(what_of([] { values_by_factor(1, 2, std::nan("")); }), "does not grow"));
  EXPECT_TRUE(has(what_of([] { values_by_step(1, 2, 0); }), "--step 0 does not grow"));
  EXPECT_TRUE(has(what_of([] { values_by_step(1, 1000000, 1); }), "more than 64 values"));
  EXPECT_TRUE(has(what_of([] { values_by_step(0, 4, 1); }), "--from 0 is no size"));
  EXPECT_TRUE(has(what_of([] { values_by_factor(1, INT64_MAX, 2); }), "more than any machine holds"));
}

measure::ProblemSpec base() {
  measure::ProblemSpec s;
  s.batch = 4, s.seqlen_q = s.seqlen_k = 1024, s.nheads = 32, s.nheads_k = 8, s.headdim = s.headdim_v = 64;
  return s;
}

measure::ProblemSpec at(SweepAxis axis, int64_t value, const std::string& fix) { return steps_of(axis, {value}, base(), 2048, fix).at(0).spec; }

TEST(LabSweepSmall, WhatChangesAndWhatStays) {
  EXPECT_EQ(at(SweepAxis::kSeqlen, 256, "batch").seqlen_k, 256);
  EXPECT_EQ(at(SweepAxis::kSeqlen, 256, "batch").batch, 4);
  EXPECT_EQ(at(SweepAxis::kSeqlen, 256, "tokens").batch, 16);
  EXPECT_EQ(at(SweepAxis::kBatch, 2, "tokens").seqlen_q, 2048);
  EXPECT_EQ(at(SweepAxis::kNheads, 16, "embed").headdim, 128);
  EXPECT_EQ(at(SweepAxis::kNheads, 16, "embed").headdim_v, 128);
  EXPECT_EQ(at(SweepAxis::kNheads, 16, "embed").nheads_k, 4);  // groups of four stay
  EXPECT_EQ(at(SweepAxis::kNheads, 16, "headdim").headdim, 64);
  EXPECT_EQ(at(SweepAxis::kHeaddim, 128, "nheads").nheads, 32);
  EXPECT_EQ(at(SweepAxis::kHeaddim, 128, "embed").nheads, 16);
  EXPECT_EQ(at(SweepAxis::kEmbed, 4096, "nheads").headdim, 128);
  EXPECT_EQ(at(SweepAxis::kEmbed, 4096, "headdim").nheads, 64);
  EXPECT_EQ(at(SweepAxis::kSeqlenK, 77, "").seqlen_q, 1024);
  EXPECT_EQ(steps_of(SweepAxis::kThreads, {3}, base(), 2048, "").at(0).threads, 3);
  EXPECT_TRUE(at(SweepAxis::kCausal, 1, "").causal);
  EXPECT_TRUE(has(what_of([] { at(SweepAxis::kNheads, 24, "embed"); }), "24 does not divide 2048"));
  EXPECT_TRUE(has(what_of([] { at(SweepAxis::kNheads, 6, "headdim"); }), "no multiple of the 4"));
  EXPECT_TRUE(has(what_of([] { at(SweepAxis::kSeqlen, 0, "batch"); }), "seqlen 0 is no size"));
  EXPECT_TRUE(has(what_of([] { at(SweepAxis::kThreads, 5000, ""); }), "out of range"));
  EXPECT_TRUE(has(what_of([] { at(SweepAxis::kCausal, 2, ""); }), "neither 0"));
  EXPECT_EQ(describe_without(SweepAxis::kSeqlen, "batch", base(), 2048), "B4 H32 Hk8 D64 fp32");
  EXPECT_EQ(describe_without(SweepAxis::kNheads, "embed", base(), 2048), "B4 S1024 embed 2048 fp32");
}

TEST(LabSweepSmall, PresetsAreProblems) {
  for (const SweepPreset& preset : sweep_presets()) {
    const std::vector<std::string> fixes = fixes_of(preset.axis);
    const auto steps = steps_of(preset.axis, preset.values, preset.spec, preset.spec.nheads * preset.spec.headdim, fixes.empty() ? "" : fixes[0]);
    EXPECT_EQ(steps.size(), preset.values.size()) << preset.name;
    for (const Step& step : steps) EXPECT_GT(measure::cost_of(step.spec, measure::Pass::kForward).flops, 0) << preset.name;
  }
  EXPECT_EQ(sweep_preset("seqlen")->values.back(), 16384);
  EXPECT_EQ(sweep_preset("nothing"), nullptr);
}

// One row, as `fattn sweep` writes it; 0 seconds: it failed.
ordered_json row(int64_t seqlen, const std::string& contestant, double seconds, double spread = 0.01, const std::string& status = "out_of_memory") {
  ordered_json one = measure::to_json([&] {
    measure::ProblemSpec s = base();
    s.seqlen_q = s.seqlen_k = seqlen;
    return s;
  }());
  one["value"] = seqlen, one["contestant"] = contestant, one["pass"] = "fwd";
  one["status"] = seconds > 0 ? "ok" : status;
  one["reason"] = seconds > 0 ? ordered_json(nullptr) : ordered_json("needs too much");
  one["checks"] = {{{"tensor", "o"}, {"error", 1e-7}, {"allowed", 4e-7}, {"pass", true}},
                   {{"tensor", "lse"}, {"error", 3e-7}, {"allowed", 4e-7}, {"pass", true}}};
  if (seconds > 0) {
    one["time_median_s"] = seconds;
    one["time_ci_low_s"] = seconds * (1 - spread);
    one["time_ci_high_s"] = seconds * (1 + spread);
    one["flops_per_s"] = 1e9, one["peak_flops_per_s"] = 2e9, one["peak"] = "FMA";
    one["extra_bytes"] = contestant == "standard" ? seqlen * seqlen : 100 * seqlen;
  }
  return one;
}

ordered_json record_of(ordered_json rows, const std::vector<int64_t>& values) {
  add_comparisons(rows, "standard");
  return {{"fattn_sweep", kSweepVersion},
          {"flags", {"--over", "seqlen", "--values", "256,512", "--causal"}},
          {"complete", true},
          {"environment", {{"library_version", "1.0"}, {"commit", "abc"}, {"cpu", {{"model", "A"}, {"logical_cpus", 4}, {"usable_threads", 4}}}}},
          {"sweep",
           {{"preset", nullptr},
            {"over", "seqlen"},
            {"values", values},
            {"fix", "batch"},
            {"passes", {"fwd"}},
            {"contestants", {"standard", "fattn"}},
            {"baseline", "standard"},
            {"problem", "B4 H32 D64 fp32"},
            {"device", "A <b>CPU</b>"}}},
          {"rows", rows}};
}

Sweep crossing() {
  return read_sweep(record_of({row(256, "standard", 1), row(256, "fattn", 1.25), row(512, "standard", 4), row(512, "fattn", 2),
                               row(1024, "standard", 16), row(1024, "fattn", 4), row(2048, "standard", 0), row(2048, "fattn", 16)},
                              {256, 512, 1024, 2048}));
}

TEST(LabSweepSmall, ComparisonsAreOfRowsThatAreOk) {
  const Sweep sweep = crossing();
  EXPECT_NEAR(*sweep.cell(512, "fattn", "fwd")->speedup, 2, 1e-12);
  EXPECT_NEAR(*sweep.cell(512, "fattn", "fwd")->memory_share, 100.0 / 512, 1e-12);
  EXPECT_NEAR(*sweep.cell(512, "fattn", "fwd")->tokens_per_s, 4 * 512 / 2.0, 1e-9);
  EXPECT_FALSE(sweep.cell(2048, "fattn", "fwd")->speedup);
  EXPECT_FALSE(sweep.cell(2048, "fattn", "fwd")->memory_share);
  EXPECT_FALSE(sweep.cell(2048, "standard", "fwd")->seconds);
  EXPECT_EQ(sweep.cell(512, "fattn", "fwd")->error, "lse 3.0e-07 of 4.0e-07");
  EXPECT_EQ(sweep.cell(333, "fattn", "fwd"), nullptr);
  const Sweep wide = read_sweep(record_of({row(256, "standard", 1, 0.5), row(256, "fattn", 0.9, 0.5)}, {256}));
  EXPECT_TRUE(wide.cell(256, "fattn", "fwd")->undecided);
}

std::string all_of(const Sweep& sweep) {
  std::string text;
  for (const std::string& sentence : findings(sweep)) text += sentence + "\n";
  return text;
}

TEST(LabSweepSmall, WhatItFound) {
  const std::string text = all_of(crossing());
  EXPECT_TRUE(has(text,
                  "Forward pass, fattn: faster than standard from seqlen 512 on (2.00x at seqlen 512 to 4.00x at seqlen 1024); slower at seqlen 256 "
                  "(0.80x). It adds 9.8 % of standard's memory at seqlen 1024."))
      << text;
  EXPECT_TRUE(has(text, "standard does not fit into memory at seqlen 2048; fattn still runs at seqlen 2048.")) << text;
  EXPECT_TRUE(has(text, "standard: time grows as seqlen^2.00, 95 % interval 2.00 to 2.00, from 3 lengths.")) << text;
}

TEST(LabSweepSmall, NeverMoreThanTheNumbersCarry) {
  // Overlapping intervals are no win, whatever the medians are.
  const std::string open = all_of(read_sweep(record_of({row(256, "standard", 1, 0.5), row(256, "fattn", 0.8, 0.5)}, {256})));
  EXPECT_TRUE(has(open, "as fast as standard, within what was measured, 1.25x at seqlen 256")) << open;
  EXPECT_TRUE(has(open, "how its time grows with seqlen is not known: 1 length was measured; 3 are needed")) << open;
  const std::string slow = all_of(read_sweep(record_of({row(256, "standard", 1), row(256, "fattn", 2)}, {256})));
  EXPECT_TRUE(has(slow, "fattn: slower than standard, 0.50x at seqlen 256")) << slow;
  const std::string alone = all_of(read_sweep(record_of({row(256, "standard", 0), row(256, "fattn", 2)}, {256})));
  EXPECT_TRUE(has(alone, "nowhere measured together with standard, so no speed-up is known")) << alone;
  const std::string none = all_of(read_sweep(record_of({row(256, "standard", 1), row(256, "fattn", 0, 0, "unsupported")}, {256})));
  EXPECT_TRUE(has(none, "fattn was not measured: needs too much.")) << none;
  EXPECT_FALSE(has(none, "faster")) << none;
  const std::string wild = all_of(
      read_sweep(record_of({row(256, "fattn", 1), row(512, "fattn", 9), row(1024, "fattn", 2), row(2048, "fattn", 90)}, {256, 512, 1024, 2048})));
  EXPECT_TRUE(has(wild, "is not told well by what was measured")) << wild;
}

TEST(LabSweepSmall, FiguresShowWhatIsThereAndSayWhatIsNot) {
  const Sweep sweep = crossing();
  const std::vector<chart::Panel> panels = panels_of(sweep, "fwd");
  ASSERT_EQ(panels.size(), 5U);
  EXPECT_EQ(panels[0].note, "standard: out of memory at 2048.");
  EXPECT_TRUE(std::isnan(panels[0].lines[0].points[3].y));
  EXPECT_EQ(panels[2].bars.at(0).labels, (std::vector<std::string>{"0.8x", "2x", "4x", "standard: out of memory"}));
  EXPECT_TRUE(has(panels[3].references.at(0).label, "slope 2"));
  EXPECT_TRUE(has(panels[3].references.at(1).label, "standard: seqlen^2.00 (95 %: 2.00 to 2.00)"));
  EXPECT_TRUE(has(panels[4].references.at(0).label, "ceiling measured here: FMA (2 GFLOP/s)"));
  const std::string svg = to_svg(figure_of(sweep, sweep.passes));
  EXPECT_FALSE(has(svg, "<b>"));
  EXPECT_TRUE(has(svg, "A &lt;b&gt;CPU&lt;/b&gt;"));
  EXPECT_FALSE(has(svg, "nan"));
}

TEST(LabSweepSmall, WhatIsNoSweep) {
  const ordered_json good = record_of(ordered_json::array({row(256, "fattn", 1)}), {256});
  EXPECT_TRUE(has(what_of([&] { read_sweep({{"fattn_record", 1}}); }), "another command"));
  EXPECT_TRUE(has(what_of([&] { read_sweep({{"x", 1}}); }), "no record of fattn sweep"));
  EXPECT_TRUE(has(what_of([&] { read_sweep(nullptr); }), "no record"));
  EXPECT_TRUE(has(what_of([&] { read_sweep(ordered_json::array()); }), "no record"));
  for (const auto& [pointer, value] : std::vector<std::pair<std::string, ordered_json>>{{"/fattn_sweep", 2},
                                                                                        {"/sweep/over", "nothing"},
                                                                                        {"/sweep/over", 3},
                                                                                        {"/sweep/values", "x"},
                                                                                        {"/rows", 4},
                                                                                        {"/rows/0/value", "a"},
                                                                                        {"/rows/0/status", nullptr},
                                                                                        {"/complete", "yes"}}) {
    ordered_json bad = good;
    bad[ordered_json::json_pointer(pointer)] = value;
    EXPECT_NE(what_of([&] { read_sweep(bad); }), "") << pointer;
  }
  EXPECT_EQ(what_of([&] { read_sweep(good); }), "");
}

TEST(LabSweepSmall, RowsThatNeedNotBeMeasuredAgain) {
  const ordered_json record = record_of({row(256, "standard", 0), row(256, "fattn", 1)}, {256});
  const std::vector<std::string> flags = {"--over", "seqlen", "--values", "256,512,1024", "--causal"};
  const auto take = [&](const ordered_json& from, const std::vector<std::string>& with, const ordered_json& here) {
    return rows_to_resume(from, with, here, {"--values"});
  };
  const auto rows = take(record, flags, record["environment"]);
  ASSERT_EQ(rows.size(), 1U);
  EXPECT_EQ(rows[0]["contestant"], "fattn");
  ordered_json other = record["environment"];
  other["cpu"]["model"] = "B";
  EXPECT_TRUE(has(what_of([&] { take(record, flags, other); }), "it was measured on the processor A, here it is B"));
  other = record["environment"];
  other["library_version"] = "2.0";
  EXPECT_TRUE(has(what_of([&] { take(record, flags, other); }), "with fattn 1.0, here it is 2.0"));
  other = record["environment"];
  other["gpus"] = {{{"name", "G"}}};
  EXPECT_TRUE(has(what_of([&] { take(record, flags, other); }), "GPUs were: none; here they are: G"));
  EXPECT_TRUE(has(what_of([&] {
                    take(record, {"--over", "seqlen", "--no-causal"}, record["environment"]);
                  }),
                  "it was measured with --causal, this sweep is without --causal"));
  EXPECT_TRUE(has(what_of([&] {
                    take(record, {"--over", "batch", "--causal"}, record["environment"]);
                  }),
                  "with --over seqlen, this sweep is with --over batch"));
  ordered_json spoilt = record;
  spoilt.erase("environment");
  EXPECT_NE(what_of([&] { take(spoilt, flags, record["environment"]); }), "");
}

}  // namespace
}  // namespace fattn::lab
