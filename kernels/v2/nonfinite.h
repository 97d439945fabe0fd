// Inf and NaN in values under a mask: a hidden key takes no part at all, not even as 0 * inf. Seldom used, so small rather than fast.
#pragma once

#include "kernels/mask.h"
#include "kernels/ptx/convert.h"
#include "kernels/ptx/half_words.h"
#include "kernels/ptx/math.h"
#include "kernels/ptx/shared_memory.h"

namespace fattn::v2 {

template <class Element>
inline constexpr unsigned kExponentBits = is_same<Element, bf16> ? 0x7f80u : 0x7c00u;

template <class Element>
__device__ __forceinline__ bool nonfinite(unsigned bits) {
  return (bits & kExponentBits<Element>) == kExponentBits<Element>;
}

// In each half all ones where x is Inf or NaN, else 0: x * 0 + 0 is then NaN, whose lower byte is 0xff.
template <class Element>
__device__ __forceinline__ unsigned nonfinite_halves(unsigned x) {
  return ptx::spread_signs<0, 2>(ptx::fma2<Element>(x, 0, 0));
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

// Two times 1.
template <class Element>
inline constexpr unsigned kOnes = is_same<Element, bf16> ? 0x3f803f80u : 0x3c003c00u;

// Whether one of the units that this thread copied holds Inf or NaN: x * 0 + 0 is then NaN.
template <class Copy, class Tile, class Element>
__device__ __forceinline__ bool copied_nonfinite(unsigned tile) {
  unsigned sum = 0;
  Copy::for_each_unit([&](int row, int unit, bool) {
    const uint4 x = ptx::ld_shared_16(tile + Tile::offset(row, unit));
    sum = ptx::fma2<Element>(x.x, 0, sum);
    sum = ptx::fma2<Element>(x.y, 0, sum);
    sum = ptx::fma2<Element>(x.z, 0, sum);
    sum = ptx::fma2<Element>(x.w, 0, sum);
  });
  return (sum & 0x7fff7fffu) != 0;
}

// Puts 0 in place of Inf and NaN in the units that this thread copied.
template <class Copy, class Tile, class Element>
__device__ __forceinline__ void clear_copied_nonfinite(unsigned tile) {
  const auto clear = [](unsigned x) { return x & ~nonfinite_halves<Element>(x); };
  Copy::for_each_unit([&](int row, int unit, bool) {
    const unsigned address = tile + Tile::offset(row, unit);
    const uint4 x = ptx::ld_shared_16(address);
    ptx::st_shared_16(address, uint4{clear(x.x), clear(x.y), clear(x.z), clear(x.w)});
  });
}

// Multiplies the units that this thread copied by -1 or 0.
template <class Copy, class Tile, class Element>
__device__ __forceinline__ void scale_copied(unsigned tile, float factor) {
  const unsigned pair = ptx::pack2<Element>(factor, factor);
  const auto scale = [=](unsigned x) { return ptx::fma2<Element>(x, pair, 0x80008000u); };  // + -0 keeps the sign of 0
  Copy::for_each_unit([&](int row, int unit, bool) {
    const unsigned address = tile + Tile::offset(row, unit);
    const uint4 x = ptx::ld_shared_16(address);
    ptx::st_shared_16(address, uint4{scale(x.x), scale(x.y), scale(x.z), scale(x.w)});
  });
}

// Adds the Inf and NaN of a block of values to the rows that see them, as if with weight 1: the sign is all that a weight leaves of them.
// `visible` counts keys from the first of the block.
template <class Tile, class Element, int kRowTiles, int kOutTiles, class Visible>
__device__ __forceinline__ void add_nonfinite(float (&o)[kRowTiles][kOutTiles][4], unsigned tile, const Visible& visible, int lane) {
#pragma unroll 1
  for (int key = 0; key < Tile::kRows; ++key) {
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) {
      const unsigned pair = ptx::ld_shared_4(tile + Tile::offset(key, n) + lane % 4 * 4);
      const float low = nonfinite<Element>(pair) ? ptx::low_float<Element>(pair) : 0.0f;
      const float high = nonfinite<Element>(pair >> 16) ? ptx::high_float<Element>(pair) : 0.0f;
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (key < visible.end[i][half] && !visible.is_before(i, half, key)) {
            o[i][n][2 * half] += low;
            o[i][n][2 * half + 1] += high;
          }
        }
      }
    }
  }
}

}  // namespace fattn::v2
