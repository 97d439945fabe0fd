// NaN passes no check.
#include "gpt2/compare/output_error.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace fattn::gpt2 {

double rounding_deviation(const Config& c, DType dtype, int64_t seqlen) {
  const double u = dtype == DType::kF32 ? 0x1p-24 : dtype == DType::kF16 ? 0x1p-11 : 0x1p-8;
  // Rounded: two normalised rows, q with k and v, the weights of attention, its output, the inside of the MLP.
  constexpr double kRounded = 6;
  // Summed: the projections, q with k, weights with v, two LayerNorms.
  const double summed = static_cast<double>(4 * c.n_embd + c.n_inner + c.headdim() + seqlen + 2 * c.n_embd);
  const double layer = kRounded * u * u + summed * 0x1p-48;
  return std::sqrt((static_cast<double>(c.n_layer) * layer + u * u + static_cast<double>(c.n_embd) * 0x1p-48) / 3);
}

OutputError compare_outputs(const std::vector<float>& a, const std::vector<float>& b, double deviation) {
  OutputError e;
  const auto n = static_cast<double>(a.size());
  double squares = 0, sum = 0;
  for (const float x : a) {
    squares += static_cast<double>(x) * static_cast<double>(x);
    e.scale = std::max(e.scale, std::fabs(static_cast<double>(x)));
  }
  e.rms = std::sqrt(squares / n);
  const double k = std::sqrt(2 * std::log(2e6 * n));
  for (size_t i = 0; i < a.size(); ++i) {
    const double error = std::fabs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    const double allowed = k * std::sqrt(2.0) * deviation * (e.rms + std::fabs(static_cast<double>(a[i])));
    sum += error;
    e.max_abs = std::max(e.max_abs, error);
    const double share = error / allowed;
    if (error == 0 && allowed == 0) continue;
    if (!(share <= e.of_allowed) && !std::isnan(e.of_allowed)) {
      e.of_allowed = share;
      e.allowed_abs = allowed;
    }
  }
  e.mean_abs = sum / n;
  if (std::isnan(e.of_allowed) || !std::isfinite(sum)) e.max_abs = e.of_allowed = std::numeric_limits<double>::quiet_NaN();
  e.relative = e.scale > 0 ? e.max_abs / e.scale : e.max_abs;
  e.passed = e.of_allowed <= 1;
  return e;
}

}  // namespace fattn::gpt2
