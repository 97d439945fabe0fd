// How near a measured time comes to what the machine can do at most, and a word for it. Ceilings are rates that were measured on this machine: the
// peak of the same run, and, where `fattn calibrate` was here, exponentials, caches, memory and the cost of a call.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lab/calibration.h"
#include "measure/problem.h"
#include "measure/record.h"

namespace fattn::lab {

// 0: not known.
struct CeilingRates {
  struct Level {
    std::string name;  // "L2", "DRAM"
    double bytes = 0;  // that it holds
    double bytes_per_s = 0;
  };
  double flops_per_s = 0, exp_per_s = 0, call_s = 0;
  std::vector<Level> levels;    // of memory, the nearest first; the last holds everything
  bool whole = false;           // no kind of rate is missing
  std::optional<double> reach;  // the share that fattn itself reached here
  int reach_calls = 0;          // of so many calls
  std::string lacks;            // why there is no more than this run's rates
};

// Of a calibration: rates of `threads` threads of a CPU; a GPU's, without its L2 cache where every call finds it full of other data.
CeilingRates ceiling_rates(const Calibration& calibration, int threads, bool cold_l2);
// Of the one that is kept for this place, if any.
CeilingRates kept_ceiling_rates(const measure::Placement& place, int threads);

// The least time of a problem, by each of its limits: what has to be done whatever the algorithm is (products and exponentials of visible pairs,
// every input and output once, a call), over the rate of this machine.
struct Ceiling {
  struct Limit {
    std::string name;  // "matrix unit" ("arithmetic" on the CPU), "exponentials", "DRAM bandwidth", "latency"
    double seconds = 0;
  };
  std::vector<Limit> limits;
  // The longest: no call is quicker. Null where no rate is known.
  const Limit* binding() const;
  // All of them, one after the other.
  double sum() const;
};
Ceiling ceiling_of(const measure::ProblemSpec& spec, measure::Pass pass, const CeilingRates& rates, bool cuda);

// The one place that has the word for a time, of the share of it that all limits together account for. What nobody reaches is no measure, so the
// share is held against the best that fattn reached on this machine while it was calibrated (without that, against all of the time):
//   good  at least 3/4 of the best: no more than a third could be won
//   fair  at least 1/2 of it
//   poor  less: the machine was seen to be used more than twice as well
// Rates that are not known only make the share smaller: then "good" and "fair" are the least that is certain, and nothing is called poor ("").
inline constexpr double kGoodOfBest = 0.75, kFairOfBest = 0.5;
std::string rating_of(double accounted, const CeilingRates& rates);
// The same for people: where the limits come from.
std::string rating_words(const CeilingRates& rates);

// Gives rows that are ok their place below the ceiling; float64, whose peak is not measured, has none. The peak is the row's own.
void rate_rows(std::vector<measure::Row>& rows, const CeilingRates& rates, const measure::Peaks& peaks);

}  // namespace fattn::lab
