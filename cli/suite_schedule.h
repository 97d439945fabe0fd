// How long a suite takes: said before it begins, told to its progress bar while it runs.
#pragma once

#include <string>
#include <vector>

#include "cli/progress.h"
#include "cli/race.h"
#include "measure/contestant.h"

namespace fattn::cli {

// One race of a suite. All contestants are taken to be as fast as the library.
struct PlannedRace {
  measure::ProblemSpec spec;  // of the contestant that has most to do
  bool grad = true;
  std::vector<measure::Pass> passes;
  measure::SamplingOptions sampling;
  size_t contestants = 1;
  double seconds = 0;  // expected, after estimate_races()
};

// Times calls of slices of the longest race of each kind (dtype, head size, mask, decode), and tells the others from their FLOPs.
void estimate_races(std::vector<PlannedRace>& races, measure::Contestant& library, const RaceOptions& options);

double seconds_of(const std::vector<PlannedRace>& races);

// Throws std::runtime_error if that is more than `patience` seconds (0: nothing is); `what` names the suite.
void refuse_if_too_long(const std::vector<PlannedRace>& races, const std::string& what, double patience);

// Says how long the races take, if that is worth saying, and tells the progress line.
void announce(const std::vector<PlannedRace>& races, Progress& progress);

}  // namespace fattn::cli
