#include "gpt2/train/schedule.h"

#include <algorithm>
#include <cmath>

namespace fattn::gpt2 {

double learning_rate(const Schedule& s, int64_t step) {
  if (step <= s.warmup) return s.peak * static_cast<double>(step) / static_cast<double>(s.warmup);
  if (s.curve == Curve::kConstant) return s.peak;
  constexpr double kPi = 3.141592653589793;
  const double falling = static_cast<double>(std::max<int64_t>(s.steps - s.warmup, 1));
  const double gone = std::min(static_cast<double>(step - s.warmup) / falling, 1.0);
  const double left = s.curve == Curve::kLinear ? 1 - gone : 0.5 * (1 + std::cos(kPi * gone));
  return s.peak * (s.floor + (1 - s.floor) * left);
}

}  // namespace fattn::gpt2
