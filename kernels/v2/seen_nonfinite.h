// Inf and NaN of an operand whose pairs are hidden in part, by a matrix instruction that counts: how many of them an element of the result sees. That
// takes as long however many there are. The product itself takes the operand with 0 in their place.
#pragma once

#include "kernels/constants.h"
#include "kernels/ptx/ldmatrix.h"
#include "kernels/ptx/math.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/ptx/warp.h"
#include "kernels/tile/for_each.h"
#include "kernels/tile/fragment.h"
#include "kernels/v2/nonfinite.h"

namespace fattn::v2 {

// 1 in each half where x is Inf of the sign or NaN, else 0.
template <class Element>
__device__ __forceinline__ unsigned marks_of(unsigned x, bool minus) {
  constexpr bool kBf16 = is_same<Element, bf16>;
  constexpr unsigned kMantissas = kBf16 ? 0x007f007fu : 0x03ff03ffu;
  const unsigned carried = (x & kMantissas) + kMantissas;  // the bit above the mantissa is set where it was not 0
  const unsigned nan = kBf16 ? ptx::spread_signs<0, 2>(carried) : ptx::spread_signs<1, 3>(carried << 5);
  const unsigned negative = ptx::spread_signs<1, 3>(x);
  return nonfinite_halves<Element>(x) & (nan | (minus ? negative : ~negative)) & kOnes<Element>;
}

// Adds the Inf and NaN of a block of values to the rows that see them, as if with weight 1: the sign is all that a weight leaves of them. v_address:
// this lane's of the tile's first key. sees(term, row tile, 16 keys) makes term -Inf where a pair is hidden, in the layout of accumulators.
template <class Tile, class Element, int kLevel, int kRowTiles, int kOutTiles, class Sees>
__device__ __forceinline__ void add_seen_nonfinite(float (&o)[kRowTiles][kOutTiles][4], unsigned tile_v, unsigned v_address, const Sees& sees) {
  bool done = true;  // NaN stays as it is
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) done = done && o[i][n][e] != o[i][n][e];
    }
  }
  if (ptx::vote_all(done)) return;
#pragma unroll 1
  for (int chunk = 0; chunk < Tile::kRows / 16; ++chunk) {
    if (ptx::vote_all(!share_nonfinite<Element>(tile_v + static_cast<unsigned>(chunk * 16 * Tile::kRowBytes), 16 * Tile::kRowBytes,
                                                ptx::thread_place().lane, 32)))
      continue;
    unsigned seen[kRowTiles][4], any = 0;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      float term[2][4];
      sees(term, i, chunk);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          unsigned& pair = seen[i][2 * n + half];
          pair = (term[n][2 * half] == -kInfinity ? 0 : kOnes<Element> & 0xffffu) |
                 (term[n][2 * half + 1] == -kInfinity ? 0 : kOnes<Element> & 0xffff0000u);
          any |= pair;
        }
      }
    }
    if (ptx::vote_all(any == 0)) continue;
#pragma unroll 1
    for (int sign = 0; sign < 2; ++sign) {
      const float added = sign == 0 ? kInfinity : -kInfinity;
      tile::for_each<0, kOutTiles / 2>([&](auto d) {
        constexpr int kD = decltype(d)::value;
        unsigned v[4];
        ptx::ldmatrix_x4_trans(v, Tile::template advance<2 * kD>(v_address) + static_cast<unsigned>(chunk * 16 * Tile::kRowBytes));
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = marks_of<Element>(v[i], sign != 0);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            float count[4] = {0, 0, 0, 0};
            tile::mma<Element, kLevel>(count, seen[i], v[2 * n], v[2 * n + 1]);
#pragma unroll
            for (int e = 0; e < 4; ++e)
              if (count[e] != 0) o[i][2 * kD + n][e] += added;
            ptx::warp_sync();  // no need of it, but the compiler then has fewer operands and counts at once
          }
        }
      });
    }
  }
}

}  // namespace fattn::v2
