// Division by a number that is known before. Include-free.
#pragma once

namespace fattn {

// Division of 31-bit numbers as multiplication: x / divisor = (x * factor) >> (31 + shift).
struct Divisor {
  unsigned factor, shift;
};
constexpr Divisor divisor_of(int divisor) {
  unsigned shift = 0;
  while ((1ull << shift) < static_cast<unsigned long long>(divisor)) ++shift;
  return {static_cast<unsigned>(((1ull << (31 + shift)) + static_cast<unsigned>(divisor) - 1) / static_cast<unsigned>(divisor)), shift};
}

}  // namespace fattn
