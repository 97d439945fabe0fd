// A confidence interval of how many times as long one set of times takes as another.
#pragma once

#include <optional>
#include <vector>

namespace fattn::lab {

// Times that may be compared with each other: all of two measurements, or those of one turn where turns are paired.
struct Stratum {
  std::vector<double> baseline, current;  // above 0
};

struct RatioInterval {
  double ratio = 0, low = 0, high = 0;  // current over baseline: the estimate, and one-sided bounds
};

// The ratio lies above `low` with the probability `level`, and so below `high`, where samples do not depend on each other. Of one stratum from the
// means of logarithms (Welch); where a time lies far from the others, of few, and of several strata (which are paired) from ranks: the bounds hold
// then for every distribution, of which the current times have that of the others times the ratio. Nothing if there are too few times for the level.
// A side of more than 48 times in a stratum is thinned by rank.
std::optional<RatioInterval> ratio_interval(std::vector<Stratum> strata, double level);

// Whether the turns of measurements differ by more than their samples do: Kruskal and Wallis's test at 5 %, the statistics of all measurements
// together. Then a turn is one observation, not its samples.
bool turns_differ(const std::vector<std::vector<std::vector<double>>>& measurements);

double median_of(std::vector<double> values);  // of one at least

}  // namespace fattn::lab
