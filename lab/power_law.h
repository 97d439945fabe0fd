// How something grows: y = factor * x^exponent, by least squares on logarithms, with the exponent's 95 % interval.
#pragma once

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

namespace fattn::lab {

struct PowerLaw {
  double factor = 1, exponent = 0;
  double low = 0, high = 0;  // the exponent's interval, by Student's t with points - 2 degrees of freedom
  size_t points = 0;
};

inline constexpr size_t kFewestPoints = 3;  // with fewer a line has no error that could be told from it

// Of points with finite x, y > 0; others are left out. Nothing if fewer than kFewestPoints different x are left.
std::optional<PowerLaw> fit_power_law(const std::vector<std::pair<double, double>>& points);

// The 97.5 % quantile of Student's t: half the width of a 95 % interval in standard errors.
double student_t(size_t degrees_of_freedom);

}  // namespace fattn::lab
