// Softcap: a score s = q k becomes tanh(s * softmax_scale / softcap), with factor = FeatureParams::score_factor; what multiplies by softcap comes
// with the exponential.
#pragma once

#include "device_abi/attention_params.h"
#include "kernels/constants.h"
#include "kernels/ptx/math.h"
#include "kernels/ptx/warp.h"

namespace fattn {

__device__ __forceinline__ const FeatureParams& features_of(const AttentionParams& p) { return static_cast<const FeatureParams&>(p); }

// All lanes of a warp together. While none of their scores reaches half of softcap, tanh is an odd polynomial (minimax on [0, 0.5], relative error
// 7e-7), which costs no turn of the unit that the exponentials wait for. Otherwise 1 - 2 / (1 + exp(2 x)), whose error of 2^-22 is that of the
// largest of these scores. tanh.approx is off by up to 2^-11 of a score: with a softcap of 50 by 2.4 % of a weight.
//
// kEach: each score has its formula by itself, so that one that a row does not see changes no bit of the row; else all have that of the greatest.
template <bool kEach = false, int kCount>
__device__ __forceinline__ void cap_scores(float (&s)[kCount], float factor) {
  constexpr float kPolynomialTo = 0.5f * kTanhUnit, kTwoLog2e = 2.88539008177792681f / kTanhUnit;
  const auto polynomial = [](float x) {
    const float y = kEach ? __fmul_rn(x, x) : x * x;  // the same in both branches
    return x * fmaf(y, fmaf(y, 1.22009599f - y, -1.26610875f), 1.56037021f);
  };
  float greatest = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) greatest = fmaxf(greatest, fabsf(s[i]));  // passes over NaN, which stays NaN either way
  if (ptx::vote_all(greatest * fabsf(factor) <= kPolynomialTo)) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] = polynomial(s[i] * factor);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float x = s[i] * factor, exact = fmaf(-2.0f, ptx::rcp(1.0f + ptx::ex2(x * kTwoLog2e)), 1.0f);
      s[i] = kEach && fabsf(x) <= kPolynomialTo ? polynomial(x) : exact;
    }
  }
}

// The same as part of an exponential, where nothing but the exponential is wanted: tanh(x) / x is a polynomial of second degree in x^2, which gives
// tanh times softcap in units of log2 of a score s by four operations, two more than those of scores that are scaled. Good while s^2 is below a
// bound: the polynomial is of how far s^2 is beyond it, so that the signs of that say it in the end. The bound is where its error makes kCurveError
// of a weight (with a softcap of 30 at a score of 8.9, of 50 at 13.7), or 0.4 of softcap. Nearer scores have relative errors of 1e-6 whose signs
// change, so that lse has fp32's accuracy. Its fifth power is a normal number from 1e-7 of softmax_scale over softcap on, which the planner sees to.
inline constexpr float kCurveError = 1e-5f;

struct CapCurve {
  float minus_most, c1, c3, c5;

  // `scale`: softcap * log2(e). The series of tanh(x) / x up to x^8, whose powers above x^4 are put down to lower ones as T3 of [0, most] does it,
  // and are then what they are around `most`.
  __device__ __forceinline__ CapCurve(float factor, float scale) {
    const float x = factor * (1.0f / kTanhUnit), y = x * x;
    // The error of the series so shortened is 17 / 315 (most / 4)^3 2 of a score.
    const float most = fminf(0.16f, ptx::ex2((2.0f / 7.0f) * ptx::lg2(592.94f * kCurveError * kLog2e / scale)));
    const float constant = 1 - most * most * most * (0.00168650794f - 0.00102513228f * most);
    const float first = most * most * (0.0303571429f - 0.0177689594f * most) - 0.333333333f;
    const float second = 0.133333333f - most * (0.0809523810f - 0.0369047619f * most);
    minus_most = -most / y;
    c1 = (constant + most * (first + most * second)) * x * scale;
    c3 = (first + 2 * most * second) * x * y * scale;
    c5 = second * y * x * y * scale;
  }
  // Whether it may well do for a tile, of whose scores some become at most `exponent`.
  __device__ __forceinline__ bool reaches(float exponent) const {
    constexpr float kPart = 0.75f;  // of the square of the bound: others are greater
    return !(exponent > 0 && exponent * exponent > -kPart * minus_most * (c1 * c1));
  }
  // Of two scores of a lane. `inside`: below 0 as long as all were, and none was NaN.
  __device__ __forceinline__ void exponents(float& s, float& t, float minus_reference, int& inside) const {
    const float a = fmaf(s, s, minus_most), b = fmaf(t, t, minus_most);
    inside &= __float_as_int(a) & __float_as_int(b);
    s = fmaf(s, fmaf(a, fmaf(a, c5, c3), c1), minus_reference);
    t = fmaf(t, fmaf(b, fmaf(b, c5, c3), c1), minus_reference);
  }
};

// cap_scores() for scores in fp32: to a relative error of 4e-7 each: of those below half of softcap of 2e-7, whatever the others are.
template <int kCount>
__device__ __forceinline__ void cap_scores_closely(float (&s)[kCount], float factor) {
  constexpr float kPolynomialTo = 0.5f, kTwoLog2e = 2.88539008177792681f;
  const float scale = factor * (1.0f / kTanhUnit);
  const auto curve = [](float x) {
    const float y = x * x;
    return x * fmaf(y, fmaf(y, fmaf(y, fmaf(y, 0.0171313443f, -0.0529842388f), 0.133247505f), -0.333330679f), 0.999999987f);
  };
  float greatest = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) greatest = fmaxf(greatest, fabsf(s[i]));  // passes over NaN
  if (ptx::vote_all(greatest * fabsf(scale) <= kPolynomialTo)) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] = curve(s[i] * scale);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float x = s[i] * scale;
      s[i] = fabsf(x) <= kPolynomialTo ? curve(x) : fmaf(-2.0f, ptx::rcp(1.0f + ptx::ex2(x * kTwoLog2e)), 1.0f);
    }
  }
}

// The capped score of one product of q and k, in all lanes of a warp.
template <class Spec>
__device__ __forceinline__ float capped_closely(const AttentionParams& p, float product) {
  if constexpr (Spec::kCapped) {
    float s[1] = {product};
    cap_scores_closely(s, features_of(p).score_factor);
    return s[0];
  }
  return product;
}

}  // namespace fattn
