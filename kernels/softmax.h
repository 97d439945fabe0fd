// Online softmax in base 2 of the rows that a warp owns, with a reference that is seldom renewed.
//
// A weight is exp2(score * scale - reference). Any reference gives the same quotients; it only has to keep the weights inside the range of
// their type. So the maximum of the scores is taken where it is needed to find a first reference (the first keys of a row, masked keys), and
// afterwards only when a weight leaves the window: the sums of the weights, which are needed anyway, tell. That saves the comparisons, the
// exchange between lanes and the rescaling of o for most blocks of keys. docs/NUMERICS.md has the consequences.
#pragma once

#include "kernels/constants.h"
#include "kernels/ptx/convert.h"
#include "kernels/ptx/math.h"
#include "kernels/ptx/warp.h"

namespace fattn {

// The greatest sum of a lane's weights in one step; above it the reference is renewed. Weights in bf16 keep their precision at any size, and
// the headroom to 2^127 is v's; fp16 ends at 65504.
template <class Element>
inline constexpr float kWeightLimit = is_same<Element, bf16> ? 16777216.0f : 16384.0f;

// State of kRowTiles tiles of 16 rows; a lane holds rows lane / 4 and lane / 4 + 8 of each, the same in the four lanes of a row.
template <int kRowTiles>
struct Softmax {
  float shift[kRowTiles][2];  // minus the reference; inf: no key seen yet
  float sum[kRowTiles][2];    // of this lane's weights alone

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        shift[i][half] = kInfinity;
        sum[i][half] = 0;
      }
    }
  }

  // Raises the references to the maximum of score tiles [first, first + count) of 8 keys, rescaling sums and o.
  template <int kKeyTiles, int kOutTiles>
  __device__ __forceinline__ void raise(const float (&s)[kRowTiles][kKeyTiles][4], int first, int count, float scale,
                                        float (&o)[kRowTiles][kOutTiles][4]) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float greatest = s[i][first][2 * half];
#pragma unroll
        for (int n = first; n < first + count; ++n) greatest = fmaxf(greatest, fmaxf(s[i][n][2 * half], s[i][n][2 * half + 1]));
        greatest = fmaxf(greatest, ptx::shfl_xor(greatest, 1));
        greatest = fmaxf(greatest, ptx::shfl_xor(greatest, 2));
        const float before = shift[i][half];
        const float now = fminf(before, -(greatest * scale));
        // A row that has seen nothing has o = 0, or what non-finite v left there, which no factor may touch.
        const float factor = before == kInfinity ? 1.0f : ptx::ex2(now - before);
        shift[i][half] = now;
        sum[i][half] *= factor;
#pragma unroll
        for (int n = 0; n < kOutTiles; ++n) {
          o[i][n][2 * half] *= factor;
          o[i][n][2 * half + 1] *= factor;
        }
      }
    }
  }
};

// The weights of 16 keys: the A operand of p v, and their sums by row.
template <int kRowTiles>
struct Weights {
  unsigned p[kRowTiles][4];
  float sum[kRowTiles][2];

  // Weighs score tile n (0 or 1 of the 16 keys) of row tile i. kGuarded: rows without a reference get weights of 0; otherwise they get inf
  // or NaN, so that within_limit fails for them.
  template <class Element, bool kGuarded>
  __device__ __forceinline__ void weigh(const float (&s)[4], int i, int n, const Softmax<kRowTiles>& softmax, float scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float shift = kGuarded && softmax.shift[i][half] == kInfinity ? 0.0f : softmax.shift[i][half];
      const float p0 = ptx::ex2(fmaf(s[2 * half], scale, shift));
      const float p1 = ptx::ex2(fmaf(s[2 * half + 1], scale, shift));
      p[i][2 * n + half] = ptx::pack2<Element>(p0, p1);
      sum[i][half] = n == 0 ? p0 + p1 : sum[i][half] + (p0 + p1);
    }
  }

  // The same with something added that grows by `slope` from one key to the next, of which `steps` are those of s[0] and s[2] (and of s[1] and s[3]
  // one less), and `shift` is minus the reference with the rest of it.
  template <class Element>
  __device__ __forceinline__ void weigh_sloped(const float (&s)[4], int i, int n, const float (&shift)[2], float scale, float slope,
                                               const float (&steps)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float p0 = ptx::ex2(fmaf(s[2 * half], scale, fmaf(slope, steps[half], shift[half])));
      const float p1 = ptx::ex2(fmaf(s[2 * half + 1], scale, fmaf(slope, steps[half] - 1.0f, shift[half])));
      p[i][2 * n + half] = ptx::pack2<Element>(p0, p1);
      sum[i][half] = n == 0 ? p0 + p1 : sum[i][half] + (p0 + p1);
    }
  }

  // False for NaN too.
  template <class Element>
  __device__ __forceinline__ bool within_limit() const {
    float all = 0;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) all = i == 0 ? sum[i][0] + sum[i][1] : all + (sum[i][0] + sum[i][1]);
    return ptx::vote_all(all <= kWeightLimit<Element>);
  }

  __device__ __forceinline__ void add_to(Softmax<kRowTiles>& softmax) const {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) softmax.sum[i][half] += sum[i][half];
    }
  }
};

}  // namespace fattn
