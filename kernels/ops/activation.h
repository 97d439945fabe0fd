// GELU in its two forms.
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

}  // namespace fattn::ops
