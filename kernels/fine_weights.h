// Weights in 16 bits from which dS is made. Those of the tensors' dtype are rounded as much as dS is, and dq and dk would err by 1.2 times what they
// need. They are not negative and seldom above 1, so that in their place, times 2^kExponent, there are
//   bf16  fp16: 11 digits in place of 8
//   fp16  the fp16 that is not above, whose sign says in which half of the way to the next one the weight is: 12 digits in place of 11
// as long as they are at least 2^(-14 - kExponent), below which digits are lost, and below 2^(16 - kExponent), the limit of fp16:
// beyond it bf16's are Inf and fp16's the greatest. NaN stays NaN, and an Inf of fp16 becomes it.
#pragma once

#include "kernels/ptx/convert.h"
#include "kernels/ptx/element.h"
#include "kernels/ptx/math.h"

namespace fattn {

template <class Element, int kExponentOfUnit>
struct FineWeights {
  static constexpr int kExponent = kExponentOfUnit;
  static constexpr float kUnit = static_cast<float>(1 << kExponent), kPart = 1 / kUnit;
  static constexpr bool kSign = !is_same<Element, bf16>;  // whether the sign is a digit

  // Two weights times kUnit, the first in the low half.
  __device__ __forceinline__ static unsigned encode(float low, float high) {
    const unsigned nearest = ptx::cvt_f16x2(low, high);
    if constexpr (!kSign) return nearest;
    const unsigned below = ptx::cvt_f16x2_to_zero(low, high);
    return below | ((below ^ nearest) << 15 & 0x80008000u);  // neighbours differ in their last bit
  }

  // The weights, times kUnit.
  __device__ __forceinline__ static float low(unsigned pair) { return decode(ptx::low_float<f16>(pair)); }
  __device__ __forceinline__ static float high(unsigned pair) { return decode(ptx::high_float<f16>(pair)); }

  // They, rounded to nearest.
  __device__ __forceinline__ static unsigned rounded(unsigned pair) {
    if constexpr (kSign)
      return scaled((pair & 0x7fff7fffu) + (pair >> 15 & 0x00010001u));
    else
      return scaled(ptx::pack2<Element>(ptx::low_float<f16>(pair), ptx::high_float<f16>(pair)));
  }

  // A pair of the dtype by kUnit.
  __device__ __forceinline__ static unsigned scaled(unsigned pair) {
    static_assert(0 < kExponent && kExponent <= 24);
    constexpr unsigned kF16 = kExponent < 15 ? (15u - kExponent) << 10 : 1u << (24 - kExponent), kBF16 = (127u - kExponent) << 7;
    return ptx::fma2<Element>(pair, (kSign ? kF16 : kBF16) * 0x10001u, 0x80008000u);
  }

 private:
  // With the sign as the first digit behind fp16's, those of fp32's exponent follow: 113 to 142 of 256, about a half.
  __device__ __forceinline__ static float decode(float x) {
    if constexpr (!kSign) return x;
    const unsigned bits = __float_as_uint(x);
    return __uint_as_float((bits & 0x7fffe000u) | bits >> 19);
  }
};

}  // namespace fattn
