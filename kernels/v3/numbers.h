// Numbers that several v3 kernels use.
#pragma once

namespace fattn::v3 {

inline constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000u);
inline constexpr float kLog2e = 1.4426950408889634f;

}  // namespace fattn::v3
