// GELU in its two forms, and its slope.
#pragma once

#include "kernels/constants.h"
#include "kernels/ptx/math.h"

namespace fattn::ops {

enum class Activation { kNone, kGeluTanh, kGelu };

// (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)), which takes a fifth of tanhf's instructions and cancels nothing; and exp(-2 u), which ends at 2^80, from
// where on the first is 0.
struct HalfOfTanh {
  float value, exponential;
  __device__ __forceinline__ explicit HalfOfTanh(float u) {
    const float exponent = -2 * kLog2e * u;
    exponential = ptx::ex2(exponent > 80 ? 80.0f : exponent);  // NaN stays
    value = exponent > 80 ? 0.0f : __fdividef(1.0f, 1.0f + exponential);
  }
};

template <Activation kActivation>
__device__ __forceinline__ float activated(float x) {
  if constexpr (kActivation == Activation::kGeluTanh) {
    return x * HalfOfTanh(0.7978845608028654f * fmaf(0.044715f * x * x, x, x)).value;
  } else if constexpr (kActivation == Activation::kGelu) {
    return 0.5f * x * erfcf(-0.7071067811865476f * x);
  } else {
    return x;
  }
}

struct ActivationAt {
  float y, slope;
};
template <Activation kActivation>
__device__ __forceinline__ ActivationAt activation_at(float x) {
  if constexpr (kActivation == Activation::kGelu) {
    const float below = 0.5f * erfcf(-0.7071067811865476f * x);
    return {x * below, fmaf(x, 0.3989422804014327f * expf(-0.5f * x * x), below)};
  } else {
    static_assert(kActivation == Activation::kGeluTanh);
    const HalfOfTanh half(0.7978845608028654f * fmaf(0.044715f * x * x, x, x));
    const float rest = half.exponential * half.value * half.value;  // (1 - tanh^2) / 4 is 0 where x^2 may be infinite
    return {x * half.value,
            rest < 0x1p-70f ? half.value : fmaf(2 * x * rest, fmaf(3 * 0.044715f * 0.7978845608028654f * x, x, 0.7978845608028654f), half.value)};
  }
}

}  // namespace fattn::ops
