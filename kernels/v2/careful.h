// Products over pairs of which some are hidden, where an operand holds Inf or NaN: a hidden pair takes no part at all, not even as 0 * Inf.
// The operand is multiplied with 0 in place of Inf and NaN; those are then added to what sees them. Seldom used, so small rather than fast.
#pragma once

#include "kernels/constants.h"
#include "kernels/ptx/convert.h"
#include "kernels/ptx/math.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/warp.h"
#include "kernels/v2/nonfinite.h"
#include "kernels/v2/swizzled_tile.h"

namespace fattn::v2 {

__device__ __forceinline__ bool finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

// Whether one of `count` floats in shared memory is Inf or NaN, or below `least`; all lanes of a warp together.
__device__ __forceinline__ bool any_nonfinite(unsigned address, int count, int lane, float least = -kInfinity) {
  bool good = true;
#pragma unroll 1
  for (int i = lane; i < count; i += 32) {
    const float x = ptx::ld_shared_f32(address + 4 * i);
    good = good && finite(x) && x >= least;
  }
  return !ptx::vote_all(good);
}

// Whether this thread's share of a tile of `bytes` bytes holds Inf or NaN: x * 0 + 0 is then NaN.
template <class Element>
__device__ __forceinline__ bool share_nonfinite(unsigned tile, int bytes, int thread, int threads) {
  unsigned sum = 0;
#pragma unroll 1
  for (int at = 16 * thread; at < bytes; at += 16 * threads) {
    const uint4 x = ptx::ld_shared_16(tile + at);
    sum = ptx::fma2<Element>(x.x, 0, sum);
    sum = ptx::fma2<Element>(x.y, 0, sum);
    sum = ptx::fma2<Element>(x.z, 0, sum);
    sum = ptx::fma2<Element>(x.w, 0, sum);
  }
  return (sum & 0x7fff7fffu) != 0;
}

template <class Element>
__device__ __forceinline__ unsigned without_nonfinite(unsigned pair) {
  return (nonfinite<Element>(pair) ? 0 : pair & 0xffffu) | (nonfinite<Element>(pair >> 16) ? 0 : pair & 0xffff0000u);
}

// Adds to d, whose column tiles begin at `first_column` of B, the Inf and NaN of B's `rows` rows where visible(row tile, half, row of B).
// factor: 1 for weights that are positive, 0 (which makes all of them NaN) for those of any sign.
template <class Element, int kInner, int kTiles, int kRowTiles, int kAllTiles, class Visible>
__device__ __forceinline__ void add_nonfinite_of(float (&d)[kRowTiles][kAllTiles][4], unsigned b_tile, int rows, int first_column, int lane,
                                                 float factor, Visible visible) {
#pragma unroll 1
  for (int row = 0; row < rows; ++row) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const unsigned pair = ptx::ld_shared_4(b_tile + SwizzledTile<kInner>::offset(row, first_column / 8 + n) + lane % 4 * 4);
      const bool low = nonfinite<Element>(pair), high = nonfinite<Element>(pair >> 16);
      if (!low && !high) continue;
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (!visible(i, half, row)) continue;
          if (low) d[i][n][2 * half] += ptx::low_float<Element>(pair) * factor;
          if (high) d[i][n][2 * half + 1] += ptx::high_float<Element>(pair) * factor;
        }
    }
  }
}

}  // namespace fattn::v2
