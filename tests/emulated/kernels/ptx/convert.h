// In place of kernels/ptx/convert.h where the host runs device code.
#pragma once

#include "shared/half.h"

namespace fattn::ptx {

inline unsigned cvt_f16x2(float low, float high) { return core::float_to_f16(low) | static_cast<unsigned>(core::float_to_f16(high)) << 16; }
inline float cvt_f32_f16(unsigned short x) { return core::f16_to_float(x); }
inline float cvt_f32_bf16(unsigned short x) { return core::bf16_to_float(x); }

}  // namespace fattn::ptx
