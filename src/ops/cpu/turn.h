// Rotary positions: the heads of a row turned by an angle for each pair of dimensions.
#pragma once

#include <cmath>
#include <vector>

#include "fattn/types.hpp"
#include "shared/half.h"

namespace fattn::ops::cpu {

class Turn {
 public:
  Turn(int64_t nheads, int64_t headdim, DType dtype, double theta) : nheads_(nheads), headdim_(headdim), dtype_(dtype) {
    for (int64_t d = 0; d < headdim / 2; ++d) frequencies_.push_back(std::pow(theta, -2.0 * static_cast<double>(d) / static_cast<double>(headdim)));
  }

  // Angles in float64: of a position of 100,000 fp32 has no more than two digits behind the point.
  void operator()(void* heads, int32_t position) const {
    const int64_t half = headdim_ / 2;
    for (int64_t d = 0; d < half; ++d) {
      const double angle = position * frequencies_[static_cast<size_t>(d)];
      const auto c = static_cast<float>(std::cos(angle)), s = static_cast<float>(std::sin(angle));
      for (int64_t h = 0; h < nheads_; ++h) {
        const int64_t i = h * headdim_ + d;
        const float x = read(heads, i), y = read(heads, i + half);
        write(heads, i, x * c - y * s);
        write(heads, i + half, y * c + x * s);
      }
    }
  }

 private:
  float read(const void* p, int64_t i) const {
    if (dtype_ == DType::kF32) return static_cast<const float*>(p)[i];
    const uint16_t bits = static_cast<const uint16_t*>(p)[i];
    return dtype_ == DType::kF16 ? core::f16_to_float(bits) : core::bf16_to_float(bits);
  }
  void write(void* p, int64_t i, float x) const {
    if (dtype_ == DType::kF32)
      static_cast<float*>(p)[i] = x;
    else
      static_cast<uint16_t*>(p)[i] = dtype_ == DType::kF16 ? core::float_to_f16(x) : core::float_to_bf16(x);
  }

  int64_t nheads_, headdim_;
  DType dtype_;
  std::vector<double> frequencies_;
};

}  // namespace fattn::ops::cpu
