// Products over pairs of which some are hidden, where an operand holds Inf or NaN: a hidden pair takes no part at all, not even as 0 * Inf.
// The operand is multiplied with 0 in place of Inf and NaN, which changes no bit of what does not see them; another product counts those that are
// seen.
#pragma once

#include "kernels/constants.h"
#include "kernels/ptx/convert.h"
#include "kernels/ptx/math.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/warp.h"
#include "kernels/v2/nonfinite.h"

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

template <class Element>
__device__ __forceinline__ unsigned without_nonfinite(unsigned pair) {
  return pair & ~nonfinite_halves<Element>(pair);
}

// The A operand of a product that counts: 1 where sees(row tile, half, inner index from this lane's first), else 0. Whether there is a 1 in the warp.
template <class Element, int kRowTiles, class Sees>
__device__ __forceinline__ bool seen_pairs(unsigned (&seen)[kRowTiles][4], const Sees& sees) {
  static_assert(kRowTiles <= 4);
  unsigned any = 0;  // two bits for each register
#pragma unroll 1     // what sees() asks for takes many registers
  for (int at = 0; at < 4 * kRowTiles; ++at) {
    const int i = at / 4, half = at % 2, inner = at / 2 % 2 * 8;
    const unsigned low = sees(i, half, inner) ? 1 : 0, high = sees(i, half, inner + 1) ? 2 : 0;
    any |= (low | high) << 2 * at;
  }
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const unsigned bits = any >> (8 * i + 2 * e);
      seen[i][e] = ((bits & 1) != 0 ? kOnes<Element> & 0xffffu : 0u) | ((bits & 2) != 0 ? kOnes<Element> & 0xffff0000u : 0u);
    }
  }
  return !ptx::vote_all(any == 0);
}

}  // namespace fattn::v2
