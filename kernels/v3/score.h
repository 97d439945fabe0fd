// What becomes of a score before the softmax: scores are q k, and softmax_scale_log2 >= 0 is applied with the exponential.
#pragma once

#include "shared/attention_params.h"

namespace fattn::v3 {

struct PlainScore {
  template <int kCount>
  static __device__ __forceinline__ void apply(float (&)[kCount], const AttentionParams&) {}
};

// For a softmax_scale that is negative or 0: the maximum is that of the scaled scores.
struct SignedScore {
  template <int kCount>
  static __device__ __forceinline__ void apply(float (&s)[kCount], const AttentionParams& p) {
    const float sign = p.softmax_scale < 0 ? -1.0f : 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] *= sign;
  }
};

}  // namespace fattn::v3
