// Single instructions of arithmetic. PTX ISA, "Floating Point Instructions: ex2, lg2, max, rcp", "Half Precision Floating Point Instructions: fma,
// min".
#pragma once

#include "kernels/ptx/element.h"

namespace fattn::ptx {

// 2^x, relative error below 2^-22; results below 2^-126 are 0. ex2(-inf) = 0, ex2(NaN) = NaN.
__device__ __forceinline__ float ex2(float x) {
  float d;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
  return d;
}

// log2(x), absolute error below 2^-22 for x near 1 and relative error elsewhere. lg2(0) = -inf.
__device__ __forceinline__ float lg2(float x) {
  float d;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
  return d;
}

// 1 / x, relative error below 2^-23; no slow path, whose call would need registers.
__device__ __forceinline__ float rcp(float x) {
  float d;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
  return d;
}

// The greater one; NaN if one is. sm_80 and later.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float d;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

// a * b + c on two 16-bit floats at once. bf16: sm_80 and later.
template <class Element>
__device__ __forceinline__ unsigned fma2(unsigned a, unsigned b, unsigned c) {
  unsigned d;
  if constexpr (is_same<Element, bf16>)
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  else
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// max(a * b, 0) on two 16-bit floats at once; of a NaN NaN. sm_80 and later.
template <class Element>
__device__ __forceinline__ unsigned mul_relu2(unsigned a, unsigned b) {
  unsigned d;
  if constexpr (is_same<Element, bf16>)
    asm("fma.rn.relu.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0u));
  else
    asm("fma.rn.relu.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0u));
  return d;
}

// The lesser of each half; of a NaN and a number the number. sm_80 and later.
template <class Element>
__device__ __forceinline__ unsigned min2(unsigned a, unsigned b) {
  unsigned d;
  if constexpr (is_same<Element, bf16>)
    asm("min.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  else
    asm("min.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

}  // namespace fattn::ptx
