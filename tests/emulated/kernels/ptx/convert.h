// In place of kernels/ptx/convert.h where the host runs device code.
#pragma once

#include <cmath>

#include "kernels/ptx/element.h"
#include "shared/half.h"

namespace fattn::ptx {

inline unsigned pair_of(unsigned short low, unsigned short high) { return low | static_cast<unsigned>(high) << 16; }
inline unsigned cvt_f16x2(float low, float high) { return pair_of(core::float_to_f16(low), core::float_to_f16(high)); }
inline unsigned cvt_bf16x2(float low, float high) { return pair_of(core::float_to_bf16(low), core::float_to_bf16(high)); }
inline float cvt_f32_f16(unsigned short x) { return core::f16_to_float(x); }
inline float cvt_f32_bf16(unsigned short x) { return core::bf16_to_float(x); }

// Of numbers below 65520, and NaN.
inline unsigned short f16_to_zero(float x) {
  const unsigned short nearest = core::float_to_f16(x);
  return std::abs(core::f16_to_float(nearest)) > std::abs(x) ? static_cast<unsigned short>(nearest - 1) : nearest;
}
inline unsigned cvt_f16x2_to_zero(float low, float high) { return pair_of(f16_to_zero(low), f16_to_zero(high)); }

template <class Element>
unsigned pack2(float low, float high) {
  return is_same<Element, bf16> ? cvt_bf16x2(low, high) : cvt_f16x2(low, high);
}
template <class Element>
float low_float(unsigned pair) {
  const auto x = static_cast<unsigned short>(pair);
  return is_same<Element, bf16> ? cvt_f32_bf16(x) : cvt_f32_f16(x);
}
template <class Element>
float high_float(unsigned pair) {
  return low_float<Element>(pair >> 16);
}

}  // namespace fattn::ptx
