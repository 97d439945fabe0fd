// Conversions between fp32 and pairs of 16-bit floats. PTX ISA, "Data Movement and Conversion Instructions: cvt".
#pragma once

#include "kernels/ptx/element.h"

namespace fattn::ptx {

// Nearest even; `low` goes to the low half. sm_80 and later.
__device__ __forceinline__ unsigned cvt_bf16x2(float low, float high) {
  unsigned d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

// Nearest even. sm_53 and later as two single conversions; cvt.rn.f16x2.f32 is sm_80 and later.
__device__ __forceinline__ unsigned cvt_f16x2(float low, float high) {
  unsigned d;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
#else
  asm("{.reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h};}" : "=r"(d) : "f"(low), "f"(high));
#endif
  return d;
}

// Towards zero.
__device__ __forceinline__ unsigned cvt_f16x2_to_zero(float low, float high) {
  unsigned d;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
#else
  asm("{.reg .b16 l, h; cvt.rz.f16.f32 l, %1; cvt.rz.f16.f32 h, %2; mov.b32 %0, {l, h};}" : "=r"(d) : "f"(low), "f"(high));
#endif
  return d;
}

__device__ __forceinline__ float cvt_f32_f16(unsigned short x) {
  float d;
  asm("cvt.f32.f16 %0, %1;" : "=f"(d) : "h"(x));
  return d;
}

// Exact: bf16 is the upper half of fp32.
__device__ __forceinline__ float cvt_f32_bf16(unsigned short x) { return __uint_as_float(static_cast<unsigned>(x) << 16); }

template <class Element>
__device__ __forceinline__ unsigned pack2(float low, float high) {
  if constexpr (is_same<Element, bf16>)
    return cvt_bf16x2(low, high);
  else
    return cvt_f16x2(low, high);
}

template <class Element>
__device__ __forceinline__ float to_float(unsigned short x) {
  if constexpr (is_same<Element, bf16>)
    return cvt_f32_bf16(x);
  else
    return cvt_f32_f16(x);
}

template <class Element>
__device__ __forceinline__ float low_float(unsigned pair) {
  return to_float<Element>(static_cast<unsigned short>(pair & 0xffffu));
}

template <class Element>
__device__ __forceinline__ float high_float(unsigned pair) {
  return to_float<Element>(static_cast<unsigned short>(pair >> 16));
}

}  // namespace fattn::ptx
