#include "lab/rank_interval.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

namespace fattn::lab {
namespace {

constexpr size_t kMostOfASide = 48;

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

}  // namespace

double median_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n % 2 ? values[n / 2] : 0.5 * (values[n / 2 - 1] + values[n / 2]);
}

std::optional<RatioInterval> ratio_interval(std::vector<Stratum> strata, double level) {
  std::vector<double> distribution = {1}, ratios;
  for (Stratum& s : strata) {
    s.baseline = thinned(std::move(s.baseline));
    s.current = thinned(std::move(s.current));
    if (s.baseline.empty() || s.current.empty()) continue;
    distribution = sum_of(distribution, mann_whitney(s.baseline.size(), s.current.size()));
    for (const double c : s.current)
      for (const double b : s.baseline) ratios.push_back(c / b);
  }
  size_t below = 0;  // so many ratios may lie below the bound
  for (double tail = 0; below < distribution.size(); ++below) {
    tail += distribution[below];
    if (!(tail <= 1 - level)) break;
  }
  if (below == 0 || 2 * below > ratios.size()) return std::nullopt;
  std::sort(ratios.begin(), ratios.end());
  return RatioInterval{median_of(ratios), ratios[below - 1], ratios[ratios.size() - below]};
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
