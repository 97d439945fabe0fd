// GELU in its two forms, and its slope.
#pragma once

namespace fattn::ops {

enum class Activation { kNone, kGeluTanh, kGelu };

template <Activation kActivation>
__device__ __forceinline__ float activated(float x) {
  if constexpr (kActivation == Activation::kGeluTanh) {
    const float u = 0.7978845608028654f * fmaf(0.044715f * x * x, x, x);
    return 0.5f * x * (1.0f + tanhf(u));
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
    const float t = tanhf(0.7978845608028654f * fmaf(0.044715f * x * x, x, x));
    const float half = fmaf(0.5f, t, 0.5f), rest = fmaf(-t, t, 1.0f);  // 1 - tanh^2 is 0 where x^2 may be infinite
    return {x * half, rest == 0 ? half : fmaf(0.5f * x * rest, fmaf(3 * 0.044715f * 0.7978845608028654f * x, x, 0.7978845608028654f), half)};
  }
}

}  // namespace fattn::ops
