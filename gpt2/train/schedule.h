// The learning rate of each step: it rises to its peak, then falls as a curve says.
#pragma once

#include <cstdint>

namespace fattn::gpt2 {

enum class Curve { kCosine, kLinear, kConstant };

struct Schedule {
  Curve curve = Curve::kCosine;
  double peak = 6e-4;
  double floor = 0.1;  // the last rate as a share of the peak; kConstant does not fall
  int64_t warmup = 0;  // steps that rise to the peak, evenly
  int64_t steps = 1;   // of the whole run

  bool operator==(const Schedule&) const = default;
};

// Of a step, counted from 1. The last step of the warm-up has the peak, the last step of all the floor.
double learning_rate(const Schedule& schedule, int64_t step);

}  // namespace fattn::gpt2
