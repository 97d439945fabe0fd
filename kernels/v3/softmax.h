// Online softmax in base 2 of the rows of one warp, in the accumulator layout of wgmma (kernels/ptx/wgmma.h): a lane holds two rows.
//
// A weight is exp2(score * scale - reference); any reference gives the same quotients, as long as the weights keep inside the range of their type.
// Most blocks take no maximum: they trust the reference and look at the sums of the weights, which are needed anyway. The price of a maximum is
// the comparisons, the exchange between lanes and the rescaling of o, all of them waits between two matrix products.
#pragma once

#include "kernels/constants.h"
#include "kernels/ptx/convert.h"
#include "kernels/ptx/math.h"
#include "kernels/ptx/warp.h"
#include "kernels/v3/alibi.h"

namespace fattn::v3 {

// The window of weights. A new reference is kHeadroom above the maximum (log2 units), so that weights begin at 2^-kHeadroom and seldom reach kLimit,
// the greatest sum of a lane's weights in one block. bf16 has fp32's range: what is lost is room for small v below (weights * v are exact down to v =
// 2^-110) and for large v above (2^103). fp16 has 15 bits above 1 and needs those below for small weights.
template <class Element>
struct Window {
  static constexpr float kHeadroom = is_same<Element, bf16> ? 16.0f : 0.0f;
  static constexpr float kLimit = is_same<Element, bf16> ? 16777216.0f : 16384.0f;
};
// A reference is renewed only where the maximum has grown by more than this: o is then rescaled less often.
inline constexpr float kPatience = 8.0f;
// With ALiBi the terms of a lane's two rows differ by a constant on either side of the diagonal. Where their references differ by the same constant,
// a key's term is one number for both. A row's reference may be raised by this for it: bf16 has the range, fp16 has not.
inline constexpr float kMostRaised = 32.0f;
struct NoRaise {};

template <class Element, int kBlockN>
struct Softmax {
  static constexpr int kScores = kBlockN / 2;
  using Scores = float[kScores];

  float reference[2];  // -inf: no key seen yet
  float sum[2];        // of this lane's weights alone

  static __device__ __forceinline__ constexpr int row_of(int i) { return i >> 1 & 1; }

  // Scores become weights, after the references were found or raised. The result says whether o has to be multiplied by `factor`. `raise` may raise
  // the references further.
  template <bool kFirst, class Raise = NoRaise>
  __device__ __forceinline__ bool update(Scores& s, float (&factor)[2], float scale, Raise raise = {}) {
    float top[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) top[i] = fmaxf(s[2 * i], s[2 * i + 1]);
#pragma unroll
    for (int i = 8; i < kScores; i += 8) {
#pragma unroll
      for (int j = 0; j < 4; ++j) top[j] = fmaxf(top[j], fmaxf(s[i + 2 * j], s[i + 2 * j + 1]));
    }
    float minus[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float x = fmaxf(top[r], top[r + 2]);
      x = fmaxf(x, ptx::shfl_xor(x, 1));
      x = fmaf(fmaxf(x, ptx::shfl_xor(x, 2)), scale, Window<Element>::kHeadroom);
      if constexpr (kFirst) {
        reference[r] = x;
      } else {
        const float before = reference[r], now = fmaxf(before, x);
        reference[r] = now - before > kPatience ? now : before;
        factor[r] = ptx::ex2(before - (reference[r] == -kInfinity ? 0.0f : reference[r]));
        sum[r] *= factor[r];
      }
      minus[r] = reference[r] == -kInfinity ? 0.0f : -reference[r];  // weights of a row without a visible key are 0, not NaN
    }
    if constexpr (!is_same<Raise, NoRaise>) {
      raise();
#pragma unroll
      for (int r = 0; r < 2; ++r) minus[r] = reference[r] == -kInfinity ? 0.0f : -reference[r];
    }
    float partial[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      s[i] = ptx::ex2(fmaf(s[i], scale, minus[row_of(i)]));
      partial[i >> 1 & 3] += s[i];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = (kFirst ? 0.0f : sum[r]) + (partial[r] + partial[r + 2]);
    return !kFirst && !ptx::vote_all(factor[0] == 1.0f && factor[1] == 1.0f);
  }

  // Of update(): raises one reference, so that the second row's is `between` above the first's. False, and nothing is done, where that were too much,
  // or a row has none.
  template <bool kFirst>
  __device__ __forceinline__ bool link(float (&factor)[2], float between) {
    const float first = fmaxf(reference[0], reference[1] - between), to[2] = {first, first + between};
    if (!ptx::vote_all(to[0] - reference[0] <= kMostRaised && to[1] - reference[1] <= kMostRaised)) return false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (!kFirst) {
        const float more = ptx::ex2(reference[r] - to[r]);
        factor[r] *= more;
        sum[r] *= more;
      }
      reference[r] = to[r];
    }
    return true;
  }

  // Scores [kFrom, kTo) become weights, trusting the references.
  template <int kFrom, int kTo>
  __device__ __forceinline__ void weigh(Scores& s, float scale) const {
#pragma unroll
    for (int i = kFrom; i < kTo; ++i) s[i] = ptx::ex2(fmaf(s[i], scale, -reference[row_of(i)]));
  }

  // The same of scores with ALiBi's terms: `line`, of each row's first key of the lane, less the reference.
  template <int kFrom, int kTo>
  __device__ __forceinline__ void weigh(Scores& s, float scale, float slope, const float (&line)[2]) const {
#pragma unroll
    for (int i = kFrom; i < kTo; ++i) s[i] = ptx::ex2(fmaf(s[i], scale, fmaf(slope, static_cast<float>(key_of(i)), line[row_of(i)])));
  }

  // The same where both rows have one line.
  template <int kFrom, int kTo>
  __device__ __forceinline__ void weigh(Scores& s, float scale, float slope, float line) const {
#pragma unroll
    for (int i = kFrom; i < kTo; ++i) s[i] = ptx::ex2(fmaf(s[i], scale, fmaf(slope, static_cast<float>(key_of(i)), line)));
  }

  // The same of scores that `curve` caps, which says by `inside` whether it could.
  template <int kFrom, int kTo, class Curve>
  __device__ __forceinline__ void weigh(Scores& s, const Curve& curve, int& inside) const {
#pragma unroll
    for (int i = kFrom; i < kTo; i += 2) {
      curve.exponents(s[i], s[i + 1], -reference[row_of(i)], inside);
      s[i] = ptx::ex2(s[i]);
      s[i + 1] = ptx::ex2(s[i + 1]);
    }
  }

  // Adds the weights to the sums, unless the warp's references were too low for some (or there is NaN, or a row without a reference), or not `good`.
  __device__ __forceinline__ bool add(const Scores& s, bool good = true) {
    float partial[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kScores; ++i) partial[i >> 1 & 3] += s[i];
    const float sum0 = partial[0] + partial[2], sum1 = partial[1] + partial[3];
    if (!ptx::vote_all(sum0 + sum1 <= Window<Element>::kLimit && good)) return false;
    sum[0] += sum0;
    sum[1] += sum1;
    return true;
  }
};

}  // namespace fattn::v3
