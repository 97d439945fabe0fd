// How far two outputs of a model are apart, and how far rounding lets them be.
#pragma once

#include <cstdint>
#include <vector>

#include "gpt2/config.h"

namespace fattn::gpt2 {

// Relative deviation of an output from what exact arithmetic gives, to first order: every value that a layer rounds to the dtype adds a relative
// error of variance u^2 / 3, u being the dtype's unit roundoff, every sum of n products in fp32 one of n 2^-48 / 3. Errors of different roundings
// are independent, and the residual stream passes them on once.
double rounding_deviation(const Config& config, DType dtype, int64_t seqlen);

struct OutputError {
  double max_abs = 0, mean_abs = 0;
  double scale = 0, rms = 0;  // of the first output: its largest absolute value, its root mean square
  double relative = 0;        // max_abs / scale
  double allowed_abs = 0;     // where max_abs is the nearest to what is allowed there
  double of_allowed = 0;      // the largest error as a share of what is allowed there; NaN if an output is NaN
  bool passed = false;
};

// Element i may differ by k * sqrt(2) * rounding_deviation * (rms + |a_i|): both outputs are rounded, and k is what the largest of so many normal
// numbers reaches but once in a million times. `a` and `b` are rows of n_embd elements in fp32.
OutputError compare_outputs(const std::vector<float>& a, const std::vector<float>& b, double deviation);

}  // namespace fattn::gpt2
