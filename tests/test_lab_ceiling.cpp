// Ceilings by hand: the least time of a problem by rates that are made up, the word for a time beside it, and what is said where rates are not known.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "lab/ceiling.h"
#include "lab/fit_kernels.h"

namespace fattn::lab {
namespace {

using measure::Pass;
using measure::ProblemSpec;

ProblemSpec spec_of(int64_t seqlen, bool causal = false) {
  ProblemSpec s;
  s.batch = 2, s.seqlen_q = s.seqlen_k = seqlen, s.nheads = s.nheads_k = 3, s.headdim = s.headdim_v = 64, s.causal = causal;
  return s;
}

CeilingRates rates_of() {
  CeilingRates rates;
  rates.flops_per_s = 1e11, rates.exp_per_s = 1e10, rates.call_s = 1e-6;
  rates.levels = {{"L2", 1e6, 2e11}, {"DRAM", HUGE_VAL, 2e10}};
  rates.whole = true;
  return rates;
}

double seconds_of(const Ceiling& ceiling, const std::string& name) {
  for (const Ceiling::Limit& limit : ceiling.limits)
    if (limit.name == name) return limit.seconds;
  return 0;
}

TEST(LabCeilingSmall, LimitsByHand) {
  const double pairs = 6.0 * 512 * 512, bytes = 4 * 6.0 * 512 * (4 * 64 + 1);
  const Ceiling forward = ceiling_of(spec_of(512), Pass::kForward, rates_of(), false);
  EXPECT_DOUBLE_EQ(seconds_of(forward, "arithmetic"), pairs * 4 * 64 / 1e11);
  EXPECT_DOUBLE_EQ(seconds_of(forward, "exponentials"), pairs / 1e10);
  EXPECT_DOUBLE_EQ(seconds_of(forward, "DRAM bandwidth"), bytes / 2e10);
  EXPECT_DOUBLE_EQ(seconds_of(forward, "latency"), 1e-6);
  EXPECT_EQ(forward.binding()->name, "arithmetic");
  EXPECT_NEAR(forward.sum(), pairs * 4 * 64 / 1e11 + pairs / 1e10 + bytes / 2e10 + 1e-6, 1e-12);
  const Ceiling backward = ceiling_of(spec_of(512), Pass::kBackward, rates_of(), true);
  EXPECT_DOUBLE_EQ(seconds_of(backward, "matrix unit"), pairs * 10 * 64 / 1e11);
  EXPECT_DOUBLE_EQ(seconds_of(backward, "exponentials"), pairs / 1e10);
  const Ceiling both = ceiling_of(spec_of(512), Pass::kForwardBackward, rates_of(), false);
  EXPECT_NEAR(seconds_of(both, "exponentials"), 2 * pairs / 1e10, 1e-12);
  EXPECT_NEAR(both.sum(), forward.sum() + ceiling_of(spec_of(512), Pass::kBackward, rates_of(), false).sum(), 1e-12);
  // Causal: half of the pairs and a bit; small: from the cache that holds it.
  EXPECT_NEAR(seconds_of(ceiling_of(spec_of(512, true), Pass::kForward, rates_of(), false), "arithmetic"), pairs / 2 * 513 / 512 * 4 * 64 / 1e11,
              1e-12);
  EXPECT_GT(seconds_of(ceiling_of(spec_of(64), Pass::kForward, rates_of(), false), "L2 bandwidth"), 0);
  EXPECT_EQ(ceiling_of(spec_of(64), Pass::kForward, CeilingRates(), false).binding(), nullptr);
}

TEST(LabCeilingSmall, WordsComeFromWhatTheMachineReached) {
  CeilingRates rates = rates_of();
  for (const double reach : {1.0, 0.8}) {
    if (reach < 1) rates.reach = reach, rates.reach_calls = 40;
    EXPECT_EQ(rating_of(0.751 * reach, rates), "good");
    EXPECT_EQ(rating_of(0.749 * reach, rates), "fair");
    EXPECT_EQ(rating_of(0.501 * reach, rates), "fair");
    EXPECT_EQ(rating_of(0.499 * reach, rates), "poor");
    EXPECT_EQ(rating_of(2, rates), "good");
    EXPECT_EQ(rating_of(std::nan(""), rates), "");
  }
  EXPECT_NE(rating_words(rates).find("80 % (one in a hundred of 40 calls"), std::string::npos) << rating_words(rates);
  rates.whole = false;
  rates.lacks = "there is no calibration";
  EXPECT_EQ(rating_of(0.1, rates), "");  // what is not known may account for the rest
  EXPECT_NE(rating_words(rates).find("there is no calibration"), std::string::npos);
}

measure::Row row_of(double seconds, DType dtype = DType::kF32) {
  measure::Row row;
  row.spec = spec_of(1024);
  row.spec.dtype = dtype;
  row.cost = measure::cost_of(row.spec, Pass::kForward);
  row.time = measure::summarize(std::vector<double>(6, seconds));
  row.peak_flops_per_s = 1e11;
  return row;
}

TEST(LabCeilingSmall, RowsHaveTheirPlace) {
  const double sum = ceiling_of(spec_of(1024), Pass::kForward, rates_of(), false).sum();
  measure::Row failed = row_of(sum);
  failed.fail({measure::Status::kUnsupported, "x"});
  std::vector<measure::Row> rows = {row_of(1.1 * sum), row_of(1.9 * sum), row_of(3 * sum), failed, row_of(sum, DType::kF64)};
  measure::Peaks peaks;
  rate_rows(rows, rates_of(), peaks);
  for (size_t i = 0; i < 3; ++i) {
    ASSERT_TRUE(rows[i].ceiling.has_value());
    EXPECT_EQ(rows[i].ceiling->rating, (std::array{"good", "fair", "poor"})[i]);
    EXPECT_NEAR(rows[i].ceiling->accounted, sum / rows[i].time->median, 1e-12);
    EXPECT_NEAR(rows[i].ceiling->fraction, rows[i].cost.flops / 1e11 / rows[i].time->median, 1e-12);
    EXPECT_EQ(measure::to_json(rows[i])["ceiling"]["rating"], rows[i].ceiling->rating);
  }
  EXPECT_FALSE(rows[3].ceiling.has_value() || rows[4].ceiling.has_value());
  EXPECT_TRUE(measure::to_json(rows[3])["ceiling"].is_null());
  // Of this run alone: the peak, and memory's rate for what no cache holds.
  CeilingRates none;
  none.lacks = "no calibration";
  rate_rows(rows, none, peaks);
  ASSERT_TRUE(rows[2].ceiling.has_value());
  EXPECT_EQ(rows[2].ceiling->rating, "");
  EXPECT_FALSE(rows[2].ceiling->whole);
}

TEST(LabCeilingSmall, FewerThreadsHaveTheirShare) {
  Calibration c;
  for (const Quantity& q : quantities(false)) c.measured[q.name] = {1e9, 1e9, 1e9, 3, ""};
  c.measured["exp_per_s"] = {4e9, 4e9, 4e9, 3, ""};
  c.measured["dram_read_bytes_per_s"] = {1.5e9, 1.5e9, 1.5e9, 3, ""};
  c.facts = {{"threads", 4}, {"logical_cpus", 4}, {"l1d_bytes", 1000}, {"l2_bytes", 2000}, {"l3_bytes", 0}, {"memory_bytes", 1e9}};
  EXPECT_DOUBLE_EQ(ceiling_rates(c, 0, false).exp_per_s, 4e9);
  const CeilingRates two = ceiling_rates(c, 2, false);
  EXPECT_DOUBLE_EQ(two.exp_per_s, 2e9);
  EXPECT_DOUBLE_EQ(two.levels.back().bytes_per_s, 1.5e9);  // no more than all have together
  ASSERT_EQ(two.levels.size(), 3U);
  EXPECT_DOUBLE_EQ(two.levels[0].bytes, 2000);
  EXPECT_TRUE(two.whole);
  EXPECT_FALSE(two.reach.has_value());
  c.measured["exp_per_s"] = {0, 0, 0, 0, "not here"};
  EXPECT_FALSE(ceiling_rates(c, 0, false).whole);
}

// The best hundredth of the calls that constants are fitted to.
TEST(LabCeiling, ReachIsMeasuredWithTheKernels) {
  FitOptions options;
  options.peak = options.peak_f32 = 1e10;
  options.seconds = 1;
  std::vector<double> shares;
  options.accounted = [&](const ProblemSpec& spec, Pass, double seconds) {
    EXPECT_GT(seconds, 0);
    if (spec.dtype == DType::kF64) return 0.0;
    shares.push_back(1e-7 / seconds);
    return shares.back();
  };
  const KernelTimes times = fit_kernels(options);
  if (shares.size() < 20) GTEST_SKIP() << "too slow for the calls that it takes";
  std::sort(shares.begin(), shares.end());
  ASSERT_TRUE(times.reach.has_value());
  EXPECT_EQ(static_cast<size_t>(times.reach_calls), shares.size());
  EXPECT_DOUBLE_EQ(*times.reach, shares[shares.size() - 1 - shares.size() / 100]);
  EXPECT_EQ(kernel_times_from_json(to_json(times)).reach, times.reach);
}

}  // namespace
}  // namespace fattn::lab
