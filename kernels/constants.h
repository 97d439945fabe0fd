// Numbers that device code needs by name.
#pragma once

namespace fattn {

inline constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000u);
inline constexpr float kNan = __builtin_bit_cast(float, 0x7fc00000u);
inline constexpr float kLog2e = 1.4426950408889634f;

}  // namespace fattn
