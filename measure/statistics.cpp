// Statistics of a set of time samples.
#include "measure/statistics.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <utility>

namespace fattn::measure {
namespace {

// The widest `drop` such that [sorted[drop], sorted[n-1-drop]] still covers the median with at least 95 %.
struct Interval {
  size_t drop = 0;
  double level = 0;
};

Interval median_interval(size_t n) {
  // P(binomial(n, 1/2) <= drop), in logarithms: 2^-n underflows beyond 1000 samples.
  const double log_half_n = -static_cast<double>(n) * std::log(2.0);
  double log_choose = 0, tail = std::exp(log_half_n);
  Interval best{0, 1 - 2 * tail};
  for (size_t k = 1; 2 * k + 1 < n; ++k) {
    log_choose += std::log(static_cast<double>(n - k + 1)) - std::log(static_cast<double>(k));
    tail += std::exp(log_choose + log_half_n);
    const double level = 1 - 2 * tail;
    if (!(level >= 0.95)) break;
    best = {k, level};
  }
  return {best.drop, std::max(best.level, 0.0)};
}

}  // namespace

Statistics summarize(std::vector<double> samples) {
  if (samples.empty()) throw std::invalid_argument("statistics of no samples");
  for (double s : samples)
    if (!std::isfinite(s)) throw std::invalid_argument("a time sample is not a finite number");
  std::sort(samples.begin(), samples.end());
  Statistics r;
  const size_t n = r.samples = samples.size();
  r.min = samples.front();
  r.max = samples.back();
  r.median = n % 2 ? samples[n / 2] : 0.5 * (samples[n / 2 - 1] + samples[n / 2]);
  for (double s : samples) r.mean += s / static_cast<double>(n);
  double squares = 0;
  for (double s : samples) squares += (s - r.mean) * (s - r.mean);
  r.stddev = n > 1 ? std::sqrt(squares / static_cast<double>(n - 1)) : 0;
  const Interval interval = median_interval(n);
  r.ci_low = samples[interval.drop];
  r.ci_high = samples[n - 1 - interval.drop];
  r.ci_level = interval.level;
  r.quartile_low = samples[n / 4];
  r.quartile_high = samples[n - 1 - n / 4];
  return r;
}

std::vector<double> kept_of_turn(std::vector<double> samples) {
  if (samples.size() > kKeptOfTurn) {
    std::sort(samples.begin(), samples.end());
    std::vector<double> ranks;
    for (size_t i = 0; i < kKeptOfTurn; ++i) ranks.push_back(samples[(2 * i + 1) * samples.size() / (2 * kKeptOfTurn)]);
    samples = std::move(ranks);
  }
  for (double& s : samples) {
    char digits[32];
    std::snprintf(digits, sizeof digits, "%.6g", s);
    s = std::strtod(digits, nullptr);
  }
  return samples;
}

bool undecided(const Statistics& a, const Statistics& b) { return !(a.ci_high < b.ci_low || b.ci_high < a.ci_low); }

}  // namespace fattn::measure
