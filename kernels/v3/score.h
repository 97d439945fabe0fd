// What becomes of a score before the softmax: scores are q k, and the scale is applied with the exponential: forward softmax_scale_log2 >= 0,
// backward exponent_scale().
#pragma once

#include "device_abi/attention_params.h"
#include "kernels/constants.h"
#include "kernels/score.h"

namespace fattn::v3 {

// Forward, of blocks that are not wild: nothing, but with softcap.
struct NoCurve {};

struct Uncapped {
  static constexpr bool kCapped = false;
  using Curve = NoCurve;
  static __device__ __forceinline__ NoCurve curve(const AttentionParams&) { return {}; }
};

struct PlainScore : Uncapped {
  static __device__ __forceinline__ float exponent_scale(const AttentionParams& p) { return p.softmax_scale * kLog2e; }
  template <int kCount>
  static __device__ __forceinline__ void apply(float (&)[kCount], const AttentionParams&) {}
};

// Softcap, with a softmax_scale of any sign.
struct CappedScore {
  static constexpr bool kCapped = true;
  using Curve = CapCurve;
  static __device__ __forceinline__ CapCurve curve(const AttentionParams& p) { return {features_of(p).score_factor, p.softmax_scale_log2}; }
  static __device__ __forceinline__ float exponent_scale(const AttentionParams& p) { return p.softmax_scale_log2; }
  template <int kCount>
  static __device__ __forceinline__ void apply(float (&s)[kCount], const AttentionParams& p) {
    cap_scores(s, features_of(p).score_factor);
  }
};

// Forward, for a softmax_scale that is negative or 0: the maximum is that of the scaled scores.
struct SignedScore : Uncapped {
  template <int kCount>
  static __device__ __forceinline__ void apply(float (&s)[kCount], const AttentionParams& p) {
    const float sign = p.softmax_scale < 0 ? -1.0f : 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] *= sign;
  }
};

}  // namespace fattn::v3
