// A problem computed by several algorithms of the library: held against each other, then timed in turns.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "measure/contestant.h"
#include "measure/statistics.h"

namespace fattn::lab {

struct RaceEntry {
  std::string algorithm;
  std::string reason;  // why it has no time: not there, no memory, or another answer than the first; empty: it has one
  measure::Statistics time;
  int64_t extra_bytes = 0;  // that a call allocates, outputs included
  double difference = 0;    // the largest from the first's outputs; of the first 0
  bool ok() const { return reason.empty(); }
};

// `pass`: forward or backward. Two results may differ by the limits of the course, 1e-5 in fp32, 1e-3 in fp16 and 8e-3 in bf16, times the largest
// number where that is above 1; one that differs by more, or by NaN, is not timed.
std::vector<RaceEntry> race(const measure::ProblemSpec& spec, measure::Pass pass, const std::vector<std::string>& algorithms,
                            const measure::Placement& place);

// Largest difference that `race` allows where no number is above 1.
double course_limit(DType dtype);

}  // namespace fattn::lab
