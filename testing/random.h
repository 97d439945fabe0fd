// Normally distributed numbers from a counter: element i of a stream does not depend on how the others are drawn, so a
// tensor has the same numbers in every layout and dtype (but for rounding).
#pragma once

#include <cmath>
#include <cstdint>

namespace fattn::testing {

// Steele, Lea, Flood: Fast splittable pseudorandom number generators (OOPSLA 2014): the finaliser of SplitMix64.
inline uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

class Random {
 public:
  Random(uint64_t seed, uint64_t stream) : key_(mix(seed ^ mix(stream))) {}

  // In (0, 1).
  double uniform(uint64_t i) const { return (static_cast<double>(mix(key_ + i) >> 12) + 0.5) * 0x1p-52; }

  // N(0, 1), by Box and Muller.
  double normal(uint64_t i) const {
    constexpr double kTwoPi = 6.283185307179586;
    return std::sqrt(-2 * std::log(uniform(2 * i))) * std::cos(kTwoPi * uniform(2 * i + 1));
  }

 private:
  uint64_t key_;
};

}  // namespace fattn::testing
