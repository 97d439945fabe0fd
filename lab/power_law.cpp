#include "lab/power_law.h"

#include <cmath>
#include <limits>
#include <set>

namespace fattn::lab {
namespace {

constexpr double kT[] = {12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448, 2.1314,
                         2.1199,  2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423};
constexpr double kNormal = 1.959964;

}  // namespace

double student_t(size_t degrees_of_freedom) {
  constexpr size_t kTabulated = sizeof kT / sizeof kT[0];
  if (degrees_of_freedom == 0) return std::numeric_limits<double>::infinity();
  if (degrees_of_freedom <= kTabulated) return kT[degrees_of_freedom - 1];
  // The first terms of its expansion about the normal distribution (Cornish and Fisher).
  const double n = static_cast<double>(degrees_of_freedom), z = kNormal;
  return z + (z * z * z + z) / (4 * n) + (5 * std::pow(z, 5) + 16 * z * z * z + 3 * z) / (96 * n * n);
}

std::optional<PowerLaw> fit_power_law(const std::vector<std::pair<double, double>>& points) {
  std::vector<std::pair<double, double>> logs;
  std::set<double> different;
  for (const auto& [x, y] : points)
    if (std::isfinite(x) && std::isfinite(y) && x > 0 && y > 0) {
      logs.emplace_back(std::log(x), std::log(y));
      different.insert(x);
    }
  if (different.size() < kFewestPoints) return std::nullopt;
  const auto n = static_cast<double>(logs.size());
  double mean_x = 0, mean_y = 0, xx = 0, xy = 0;
  for (const auto& [x, y] : logs) mean_x += x / n, mean_y += y / n;
  for (const auto& [x, y] : logs) xx += (x - mean_x) * (x - mean_x), xy += (x - mean_x) * (y - mean_y);
  PowerLaw law;
  law.points = logs.size();
  law.exponent = xy / xx;
  law.factor = std::exp(mean_y - law.exponent * mean_x);
  double squares = 0;
  for (const auto& [x, y] : logs) {
    const double off = y - mean_y - law.exponent * (x - mean_x);
    squares += off * off;
  }
  const double half = student_t(logs.size() - 2) * std::sqrt(squares / (n - 2) / xx);
  law.low = law.exponent - half;
  law.high = law.exponent + half;
  return law;
}

}  // namespace fattn::lab
