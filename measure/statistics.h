// Statistics of a set of time samples: order statistics, spread, and a confidence interval of the median.
#pragma once

#include <cstddef>
#include <vector>

namespace fattn::measure {

struct Statistics {
  size_t samples = 0;
  double min = 0, median = 0, mean = 0, max = 0, stddev = 0;
  // 95 % confidence interval of the median from order statistics, which assumes nothing about the distribution: the number
  // of samples below the true median is binomial(n, 1/2). With fewer than 6 samples no pair of order statistics reaches
  // 95 %; the interval is then [min, max] and ci_level says what it covers.
  double ci_low = 0, ci_high = 0, ci_level = 0;
  double quartile_low = 0, quartile_high = 0;     // half of the samples lie between them
  std::vector<double> turn_medians;               // of samples taken in turns; set by who took them
  std::vector<std::vector<double>> turn_samples;  // what a record keeps of each turn: kept_of_turn()
  // The middle half of the samples as a share of the median: a few per cent on a quiet machine, however many samples there are.
  double spread() const { return median > 0 ? (quartile_high - quartile_low) / median : 0; }
};

// Throws std::invalid_argument if there is no sample or a sample is not a finite number.
Statistics summarize(std::vector<double> samples);

// What a record keeps of a turn, for comparisons with other records: all samples in the order in which they were taken, or, of more than
// kKeptOfTurn, so many of evenly spaced ranks, which scatter less than so many samples would. Six significant digits.
constexpr size_t kKeptOfTurn = 8;
std::vector<double> kept_of_turn(std::vector<double> samples);

// Neither can be called faster: the intervals of the medians overlap.
bool undecided(const Statistics& a, const Statistics& b);

}  // namespace fattn::measure
