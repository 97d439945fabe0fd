// Which of many things in a row belong to a random share of them: of each 1 / share one, so that few things have their share too.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "gpt2/data/permutation.h"

namespace fattn::gpt2 {

class ValidationDraw {
 public:
  ValidationDraw(double share, uint64_t seed) : share_(share), seed_(scrambled(seed)) {}

  bool has(uint64_t i) const {
    if (share_ <= 0) return false;
    // One point is drawn in each stretch of 1 / share; those that can lie in [i, i + 1) are looked at.
    const auto x = static_cast<double>(i);
    for (double stretch = std::max(0.0, std::floor(x * share_) - 1); stretch <= (x + 1) * share_; ++stretch) {
      const double random = static_cast<double>(scrambled(seed_ ^ static_cast<uint64_t>(stretch)) >> 11) * 0x1p-53;
      if (std::floor((stretch + random) / share_) == x) return true;
    }
    return false;
  }

 private:
  double share_;
  uint64_t seed_;
};

}  // namespace fattn::gpt2
