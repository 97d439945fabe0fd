// Online softmax in base 2 of the rows of one warp, in the accumulator layout of wgmma (kernels/ptx/wgmma.h): a lane holds two rows.
//
// A weight is exp2(score * scale - reference); any reference gives the same quotients, as long as the weights keep inside the range of their type.
// The rounding of a weight that makes up most of its row is the error of o, unless the reference makes that weight a power of two: then it is exact.
// Most blocks have no such weight and take no maximum: the sums of their weights, which are needed anyway, tell. The price of a maximum is
// the comparisons, the exchange between lanes and the rescaling of o, all of them waits between two matrix products.
#pragma once

#include "kernels/constants.h"
#include "kernels/ptx/convert.h"
#include "kernels/ptx/math.h"
#include "kernels/ptx/warp.h"
#include "kernels/v3/alibi.h"

namespace fattn::v3 {

// The window of weights. A new reference is kHeadroom above the maximum (log2 units), which so has the weight kGreatest. bf16 has fp32's range: what
// is lost is room for small v below (weights * v are exact down to v = 2^-110). fp16 needs the bits below for small weights.
template <class Element>
struct Window {
  static constexpr float kHeadroom = is_same<Element, bf16> ? 16.0f : 0.0f;
  static constexpr float kGreatest = is_same<Element, bf16> ? 0x1p-16f : 1.0f;
  // The most that a lane's weights of a block may sum to: where each has some more than the last, they would leave the range of their type.
  static constexpr float kMost = is_same<Element, bf16> ? 0x1p24f : 0x1p14f;
};
// A block dominates a lane's rows if its weights sum to more than kDominance times those of all blocks before, and one more greatest weight. What is
// below may round the greatest weight of a row that is at most some third of it. A lower bound finds blocks of ordinary scores, too.
inline constexpr float kDominance = 2.0f;
// What a reference may lack of the greatest score: that weight is then a power of two when it is rounded, and nearly when it is summed up.
inline constexpr float kExactReference = 0x1p-15f;
// The greatest weight that can be brought back into the window by a factor: sums of it are finite.
inline constexpr float kMostWeight = 0x1p100f;
template <class Element, int kBlockN>
struct Softmax {
  static constexpr int kScores = kBlockN / 2;
  using Scores = float[kScores];

  float reference[2];  // -inf: no key seen yet
  float sum[2];        // of this lane's weights alone

  static __device__ __forceinline__ constexpr int row_of(int i) { return i >> 1 & 1; }

  // Scores become weights, after the references were found or raised. The result says whether o has to be multiplied by `factor`. kGreat:
  // references may be so great that they lack something.
  template <bool kFirst, bool kGreat = true>
  __device__ __forceinline__ bool update(Scores& s, float (&factor)[2], float scale) {
    float top[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) top[i] = fmaxf(s[2 * i], s[2 * i + 1]);
#pragma unroll
    for (int i = 8; i < kScores; i += 8) {
#pragma unroll
      for (int j = 0; j < 4; ++j) top[j] = fmaxf(top[j], fmaxf(s[i + 2 * j], s[i + 2 * j + 1]));
    }
    float minus[2], rest[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float x = fmaxf(top[r], top[r + 2]);
      x = fmaxf(x, ptx::shfl_xor(x, 1));
      const float greatest = fmaxf(x, ptx::shfl_xor(x, 2));
      x = fmaf(greatest, scale, Window<Element>::kHeadroom);
      if constexpr (kFirst) {
        reference[r] = x;
      } else {
        const float before = reference[r];
        reference[r] = fmaxf(before, x);
        factor[r] = ptx::ex2(before - (reference[r] == -kInfinity ? 0.0f : reference[r]));
        sum[r] *= factor[r];
      }
      minus[r] = reference[r] == -kInfinity ? 0.0f : -reference[r];  // weights of a row without a visible key are 0, not NaN
      rest[r] = reference[r] == x && x > -kInfinity ? fmaf(greatest, scale, minus[r] + Window<Element>::kHeadroom) : 0.0f;
    }
    float partial[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] = ptx::ex2(fmaf(s[i], scale, minus[row_of(i)]));
    if (kGreat && !ptx::vote_all(fabsf(rest[0]) < kExactReference && fabsf(rest[1]) < kExactReference)) [[unlikely]] {
      // References of great scores are rounded by as much as weights are.
#pragma unroll
      for (int r = 0; r < 2; ++r) rest[r] = fabsf(rest[r]) < 1 ? ptx::ex2(-rest[r]) : 1.0f;
#pragma unroll
      for (int i = 0; i < kScores; ++i) s[i] *= rest[row_of(i)];
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) partial[i >> 1 & 3] += s[i];
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = (kFirst ? 0.0f : sum[r]) + (partial[r] + partial[r + 2]);
    return !kFirst && !ptx::vote_all(factor[0] == 1.0f && factor[1] == 1.0f);
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

  // Adds the weights to the sums, unless they dominate rows of the warp (or there is NaN, or a row without a reference), or are not `good`.
  __device__ __forceinline__ bool add(const Scores& s, bool good = true) {
    float partial[2];
    sum_up(s, partial);
    const float both = partial[0] + partial[1];
    good = good && both <= fmaf(kDominance, sum[0] + sum[1], Window<Element>::kGreatest) && both <= Window<Element>::kMost;
    if (!ptx::vote_all(good)) return false;
    sum[0] += partial[0];
    sum[1] += partial[1];
    return true;
  }

  // Adds weights that dominate rows: the references rise to the greatest weights, and weights and sums are multiplied by `factor`, as o has to be.
  // False, and nothing is done, where weights are beyond all bounds (or there is NaN in a row that had none, or a row without a reference), or not
  // `good`.
  __device__ __forceinline__ bool add_dominant(Scores& s, float (&factor)[2], bool good = true) {
    float top[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kScores; i += 2) top[row_of(i)] = fmaxf(top[row_of(i)], fmaxf(s[i], s[i + 1]));
    float partial[2];
    sum_up(s, partial);  // which show NaN: a maximum does not
#pragma unroll
    for (int r = 0; r < 2; ++r) good = good && (partial[r] <= kMostWeight || sum[r] != sum[r]);
    if (!ptx::vote_all(good)) return false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float x = fmaxf(top[r], ptx::shfl_xor(top[r], 1));
      x = fmaxf(x, ptx::shfl_xor(x, 2));
      const float before = reference[r];
      reference[r] = fmaxf(before, before + (ptx::lg2(x) + Window<Element>::kHeadroom));
      factor[r] = ptx::ex2(before - reference[r]);
      sum[r] = (sum[r] + partial[r]) * factor[r];
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] *= factor[row_of(i)];
    return true;
  }

 private:
  // Of each row, in parts that do not wait for each other.
  static __device__ __forceinline__ void sum_up(const Scores& s, float (&of_row)[2]) {
    float partial[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kScores; ++i) partial[i >> 1 & 3] += s[i];
    of_row[0] = partial[0] + partial[2];
    of_row[1] = partial[1] + partial[3];
  }
};

}  // namespace fattn::v3
