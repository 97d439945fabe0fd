#include "lab/ceiling.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "fattn/system.hpp"

namespace fattn::lab {

using measure::Pass;
using measure::ProblemSpec;

CeilingRates ceiling_rates(const Calibration& c, int threads, bool cold_l2) {
  CeilingRates rates;
  rates.whole = true;
  const auto take = [&](double& rate, double measured) {
    rate = measured;
    rates.whole = rates.whole && measured > 0;
  };
  if (c.on_cuda()) {
    take(rates.flops_per_s, c.of("matrix_flops_per_s"));
    take(rates.exp_per_s, c.of("exp_per_s"));
    take(rates.call_s, c.of("launch_s"));
    if (!cold_l2 && c.of("l2_read_bytes_per_s") > 0) rates.levels.push_back({"L2", c.fact("l2_bytes"), c.of("l2_read_bytes_per_s")});
    rates.levels.push_back({"DRAM", HUGE_VAL, 0});
    take(rates.levels.back().bytes_per_s, c.of("dram_read_bytes_per_s"));
  } else {
    const double all = std::max(1.0, c.fact("threads")), here = threads > 0 ? std::min<double>(threads, all) : all;
    // Fewer threads than all: as many times one thread's rate, but no more than all have together.
    const auto of = [&](const std::string& name) {
      const double together = c.of(name), one = c.of(name + "_one_thread");
      return here < all && one > 0 ? std::min(together, one * here) : together;
    };
    take(rates.flops_per_s, of("fma_flops_per_s"));
    take(rates.exp_per_s, of("exp_per_s"));
    take(rates.call_s, c.of("call_s"));
    for (const auto& [name, rate, bytes] : {std::tuple<const char*, const char*, double>{"L1", "l1_read_bytes_per_s", here * c.fact("l1d_bytes")},
                                            {"L2", "l2_read_bytes_per_s", here * c.fact("l2_bytes")},
                                            {"L3", "l3_read_bytes_per_s", c.fact("l3_bytes")}})
      if (bytes > 0 && of(rate) > 0) rates.levels.push_back({name, bytes, of(rate)});
    rates.levels.push_back({"DRAM", HUGE_VAL, 0});
    take(rates.levels.back().bytes_per_s, of("dram_read_bytes_per_s"));
  }
  if (c.kernels && c.kernels->reach) rates.reach = c.kernels->reach, rates.reach_calls = c.kernels->reach_calls;
  return rates;
}

CeilingRates kept_ceiling_rates(const measure::Placement& place, int threads) {
  try {
    return ceiling_rates(stored_calibration(place.name()), threads, place.flush_l2);
  } catch (const std::exception& error) {
    CeilingRates rates;
    rates.lacks = error.what();
    return rates;
  }
}

const Ceiling::Limit* Ceiling::binding() const {
  const auto longest = std::max_element(limits.begin(), limits.end(), [](const Limit& a, const Limit& b) { return a.seconds < b.seconds; });
  return longest == limits.end() ? nullptr : &*longest;
}

double Ceiling::sum() const {
  double seconds = 0;
  for (const Limit& limit : limits) seconds += limit.seconds;
  return seconds;
}

Ceiling ceiling_of(const ProblemSpec& spec, Pass pass, const CeilingRates& rates, bool cuda) {
  Ceiling ceiling;
  const auto add = [&](const std::string& name, double work, double rate) {
    if (rate > 0 && work > 0) ceiling.limits.push_back({name, work / rate});
  };
  const measure::Cost cost = measure::cost_of(spec, pass);
  // Five products in the backward pass for two of the forward pass; each pass has an exponential a pair.
  const double calls = pass == Pass::kForwardBackward ? 2 : 1;
  const double passes = pass == Pass::kForward ? 1 : pass == Pass::kBackward ? 2.5 : 3.5;
  const double pairs = cost.flops / (2 * static_cast<double>(spec.headdim + spec.headdim_v)) / passes;
  add(cuda ? "matrix unit" : "arithmetic", cost.flops, rates.flops_per_s);
  add("exponentials", calls * pairs, rates.exp_per_s);
  const auto level = std::find_if(rates.levels.begin(), rates.levels.end(), [&](const auto& one) { return cost.bytes <= one.bytes; });
  // Keys beyond the lengths are not read, and the count of bytes has them.
  if (level != rates.levels.end() && spec.least_seqused_k == 0) add(level->name + " bandwidth", cost.bytes, level->bytes_per_s);
  add("latency", calls, rates.call_s > 0 ? 1 / rates.call_s : 0);
  return ceiling;
}

std::string rating_of(double accounted, const CeilingRates& rates) {
  const double best = rates.reach.value_or(1);
  if (accounted >= kGoodOfBest * best) return "good";
  if (accounted >= kFairOfBest * best) return "fair";
  return rates.whole && accounted >= 0 ? "poor" : "";
}

std::string rating_words(const CeilingRates& rates) {
  const std::string words = "of ceiling: the least time that rates measured on this machine allow, over the time. rating: ";
  const std::string share = "of the share of the time that products, exponentials, memory and the call account for together; ";
  if (!rates.lacks.empty())
    return words +
           "of the share of the time that the peak and memory's rate in this run account for; good is three quarters or more, fair half, and that is "
           "the least that is certain: " +
           rates.lacks + ".";
  if (!rates.reach)
    return words + share + "good is three quarters or more, fair half, poor less; `fattn calibrate --force` finds how much fattn can reach here.";
  return words + share +
         fmt::format(
             "fattn's best here is {:.0f} % (one in a hundred of {} calls of `fattn calibrate`); good is three quarters of that or more, fair half, "
             "poor less.",
             100 * *rates.reach, rates.reach_calls);
}

void rate_rows(std::vector<measure::Row>& rows, const CeilingRates& kept, const measure::Peaks& peaks) {
  for (measure::Row& row : rows) {
    row.ceiling.reset();
    if (!row.ok() || !row.time || !(row.peak_flops_per_s > 0) || row.spec.dtype == DType::kF64) continue;
    CeilingRates rates = kept;
    rates.flops_per_s = row.peak_flops_per_s;
    if (rates.levels.empty() && peaks.read_bytes_per_s > 0) {
      // Of a CPU whose caches hold all of it, this run knows no rate.
      const double caches = peaks.device == "cpu" ? static_cast<double>(cpu_info().l3_bytes) : 0;
      if (row.cost.bytes > caches) rates.levels.push_back({"DRAM", HUGE_VAL, peaks.read_bytes_per_s});
    }
    const Ceiling ceiling = ceiling_of(row.spec, row.pass, rates, peaks.device != "cpu");
    if (const Ceiling::Limit* limit = ceiling.binding()) {
      const double seconds = row.time->median, accounted = ceiling.sum() / seconds;
      row.ceiling = {limit->seconds, limit->name, limit->seconds / seconds, accounted, rating_of(accounted, rates), rates.reach, rates.whole};
    }
  }
}

}  // namespace fattn::lab
