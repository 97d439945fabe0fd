#include "lab/ratio_interval.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <utility>

namespace fattn::lab {
namespace {

constexpr size_t kMostOfASide = 48;
constexpr size_t kTabled = 20;         // of more times a side than this the statistic is taken to be normal
constexpr double kFewestForMeans = 5;  // a side

std::vector<double> thinned(std::vector<double> times) {
  if (times.size() <= kMostOfASide) return times;
  std::sort(times.begin(), times.end());
  std::vector<double> ranks;
  for (size_t i = 0; i < kMostOfASide; ++i) ranks.push_back(times[(2 * i + 1) * times.size() / (2 * kMostOfASide)]);
  return ranks;
}

// P(U = u) of Mann and Whitney's statistic for n and m samples of one distribution: the largest of all is one of the n with probability n / (n + m),
// and then above m others.
std::vector<double> mann_whitney(size_t n, size_t m) {
  std::vector<std::vector<double>> last(m + 1, {1}), now(m + 1);  // of n - 1 and of n, by m
  for (size_t i = 1; i <= n; ++i) {
    now[0] = {1};
    for (size_t j = 1; j <= m; ++j) {
      const double share = static_cast<double>(i) / static_cast<double>(i + j);
      std::vector<double>& p = now[j];
      p.assign(i * j + 1, 0);
      for (size_t u = 0; u < last[j].size(); ++u) p[u + j] += share * last[j][u];
      for (size_t u = 0; u < now[j - 1].size(); ++u) p[u] += (1 - share) * now[j - 1][u];
    }
    std::swap(last, now);
  }
  return last[m];
}

std::vector<double> sum_of(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> p(a.size() + b.size() - 1, 0);
  for (size_t i = 0; i < a.size(); ++i)
    for (size_t j = 0; j < b.size(); ++j) p[i + j] += a[i] * b[j];
  return p;
}

double normal_quantile(double level) {
  double low = -10, high = 10;
  for (int i = 0; i < 60; ++i) {
    const double middle = (low + high) / 2;
    (0.5 * std::erfc(-middle / std::sqrt(2.0)) < level ? low : high) = middle;
  }
  return low;
}

// Student's by Cornish and Fisher's expansion: at 99 % and 4 degrees of freedom 0.1 % too small, better with more.
double student_quantile(double level, double freedom) {
  const double z = normal_quantile(level), z2 = z * z, f = freedom;
  const double g1 = z * (z2 + 1) / 4, g2 = z * (5 * z2 * z2 + 16 * z2 + 3) / 96, g3 = z * (3 * z2 * z2 * z2 + 19 * z2 * z2 + 17 * z2 - 15) / 384;
  const double g4 = z * (79 * z2 * z2 * z2 * z2 + 776 * z2 * z2 * z2 + 1482 * z2 * z2 - 1920 * z2 - 945) / 92160;
  return z + g1 / f + g2 / (f * f) + g3 / (f * f * f) + g4 / (f * f * f * f);
}

std::vector<double> logarithms(const std::vector<double>& times) {
  std::vector<double> logs;
  logs.reserve(times.size());
  for (const double t : times) logs.push_back(std::log(t));
  return logs;
}

// Whether a value of a side lies more than four standard deviations, as the median deviation tells them, from the median of its side.
bool any_far_out(const std::vector<std::vector<double>>& sides) {
  std::vector<double> deviations;
  for (const std::vector<double>& side : sides) {
    const double middle = median_of(side);
    for (const double v : side) deviations.push_back(std::abs(v - middle));
  }
  return *std::max_element(deviations.begin(), deviations.end()) > 4 * 1.4826 * median_of(deviations);
}

// Upper quantile of chi squared by Wilson and Hilferty's cube root, good to 1 % from 2 degrees of freedom on.
double chi_squared_95(double freedom) {
  const double a = 2 / (9 * freedom);
  return freedom * std::pow(1 - a + 1.6449 * std::sqrt(a), 3);
}

// Kruskal and Wallis's statistic of groups, corrected for ties; 0 if all samples are equal.
double kruskal_wallis(const std::vector<std::vector<double>>& groups) {
  std::vector<std::pair<double, size_t>> all;
  for (size_t g = 0; g < groups.size(); ++g)
    for (const double t : groups[g]) all.emplace_back(t, g);
  std::sort(all.begin(), all.end());
  const double n = static_cast<double>(all.size());
  std::vector<double> rank_sums(groups.size(), 0);
  double ties = 0;
  for (size_t begin = 0; begin < all.size();) {
    size_t end = begin;
    while (end < all.size() && all[end].first == all[begin].first) ++end;
    const double count = static_cast<double>(end - begin), rank = static_cast<double>(begin + end + 1) / 2;
    for (size_t i = begin; i < end; ++i) rank_sums[all[i].second] += rank;
    ties += count * (count * count - 1);
    begin = end;
  }
  double h = 0;
  for (size_t g = 0; g < groups.size(); ++g)
    if (!groups[g].empty()) h += rank_sums[g] * rank_sums[g] / static_cast<double>(groups[g].size());
  h = 12 / (n * (n + 1)) * h - 3 * (n + 1);
  const double correction = 1 - ties / (n * (n * n - 1));
  return correction > 0 ? h / correction : 0;
}

// So many ratios may lie below the lower bound: the statistic is below that with a probability of at most 1 - level.
size_t ratios_below(const std::vector<Stratum>& strata, double level) {
  if (strata.size() == 1 && std::min(strata[0].baseline.size(), strata[0].current.size()) > kTabled) {
    const double n = static_cast<double>(strata[0].baseline.size()), m = static_cast<double>(strata[0].current.size());
    return static_cast<size_t>(n * m / 2 - 0.5 - normal_quantile(level) * std::sqrt(n * m * (n + m + 1) / 12));
  }
  std::vector<double> distribution = {1};
  for (const Stratum& s : strata) distribution = sum_of(distribution, mann_whitney(s.baseline.size(), s.current.size()));
  size_t below = 0;
  for (double tail = 0; below < distribution.size(); ++below) {
    tail += distribution[below];
    if (!(tail <= 1 - level)) break;
  }
  return below;
}

// Hodges and Lehmann's estimate, the median of all ratios within strata, with bounds from Mann and Whitney's statistic, summed over strata.
std::optional<RatioInterval> by_ranks(const std::vector<Stratum>& strata, double level) {
  std::vector<double> ratios;
  for (const Stratum& s : strata)
    for (const double c : s.current)
      for (const double b : s.baseline) ratios.push_back(c / b);
  const size_t below = ratios_below(strata, level);
  if (below == 0 || 2 * below > ratios.size()) return std::nullopt;
  std::sort(ratios.begin(), ratios.end());
  return RatioInterval{median_of(ratios), ratios[below - 1], ratios[ratios.size() - below]};
}

// Welch's interval of the difference of mean logarithms. Nothing where there are too few, or where one lies so far out that means are poor evidence.
std::optional<RatioInterval> by_means(const std::vector<double>& baseline, const std::vector<double>& current, double level) {
  const double n = static_cast<double>(baseline.size()), m = static_cast<double>(current.size());
  if (n < kFewestForMeans || m < kFewestForMeans || any_far_out({baseline, current})) return std::nullopt;
  const auto mean_of = [](const std::vector<double>& x) { return std::accumulate(x.begin(), x.end(), 0.0) / static_cast<double>(x.size()); };
  const double a = mean_of(baseline), b = mean_of(current);
  const auto error_of = [](const std::vector<double>& x, double mean) {  // squared, of the mean
    double squares = 0;
    for (const double v : x) squares += (v - mean) * (v - mean);
    return squares / static_cast<double>(x.size() - 1) / static_cast<double>(x.size());
  };
  const double va = error_of(baseline, a), vb = error_of(current, b), v = va + vb;
  const double width = v > 0 ? student_quantile(level, v * v / (va * va / (n - 1) + vb * vb / (m - 1))) * std::sqrt(v) : 0;
  return RatioInterval{std::exp(b - a), std::exp(b - a - width), std::exp(b - a + width)};
}

}  // namespace

double median_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n % 2 ? values[n / 2] : 0.5 * (values[n / 2 - 1] + values[n / 2]);
}

std::optional<RatioInterval> ratio_interval(std::vector<Stratum> strata, double level) {
  for (Stratum& s : strata) {
    s.baseline = thinned(std::move(s.baseline));
    s.current = thinned(std::move(s.current));
  }
  std::erase_if(strata, [](const Stratum& s) { return s.baseline.empty() || s.current.empty(); });
  if (strata.size() == 1)
    if (const std::optional<RatioInterval> interval = by_means(logarithms(strata[0].baseline), logarithms(strata[0].current), level)) return interval;
  return by_ranks(strata, level);
}

bool turns_differ(const std::vector<std::vector<std::vector<double>>>& measurements) {
  double statistic = 0, freedom = 0;
  for (const std::vector<std::vector<double>>& turns : measurements) {
    size_t samples = 0;
    for (const std::vector<double>& turn : turns) samples += turn.size();
    if (turns.size() < 2 || samples == turns.size()) continue;  // one sample a turn tells nothing of what turns do
    statistic += kruskal_wallis(turns);
    freedom += static_cast<double>(turns.size() - 1);
  }
  return freedom > 0 && statistic > chi_squared_95(freedom);
}

}  // namespace fattn::lab
