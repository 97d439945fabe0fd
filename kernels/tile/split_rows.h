// Rows of fp32 in global memory, split into two fp16 (tile/split_tile.h) and written to global memory again as the tiles that kernels want in shared
// memory: high, then low. What many CTAs read is so split once, and they only copy it.
#pragma once

#include "kernels/ptx/reduce_warp.h"
#include "kernels/tile/split_tile.h"

namespace fattn::tile {

// The greatest of what all threads of a CTA give, which is not negative. Once in a kernel.
template <int kThreads>
__device__ __forceinline__ float greatest_of_cta(float x) {
  __shared__ float of_warp[kThreads / 32];
  x = ptx::warp_max_nonnegative(x);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) x = fmaxf(x, of_warp[i]);
  return x;
}

// `rows` (or more than a tile has) rows at `source`, by all threads of a CTA; zeros for what the tile has besides. A thread takes units of 8 columns,
// neighbours take neighbours. Tile and kAligned as in SplitCopy. `inverse`: what undoes the factor. The result, with
// kTold: not 0 where something was not finite (kCleans) or is Inf.
template <class Tile, int kThreads, int kHeaddim, bool kAligned, class Cleaned = NothingCleaned, bool kTold = false>
__device__ __forceinline__ unsigned split_rows(const float* source, long long row_stride, int rows, unsigned char* to, float* inverse) {
  constexpr bool kCleans = !is_same<Cleaned, NothingCleaned>;
  constexpr int kPasses = Tile::kRows * Tile::kUnits / kThreads;
  static_assert(kPasses * kThreads == Tile::kRows * Tile::kUnits);
  const int thread = static_cast<int>(threadIdx.x);
  uint4 x[kPasses][2];
  float greatest = 0;
  int odd = 0;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int index = thread + pass * kThreads, row = index / Tile::kUnits, unit = index % Tile::kUnits;
    const float* from = source + row * row_stride + unit * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (kAligned) {
        const bool inside = row < rows && unit * 8 + half * 4 < kHeaddim;
        x[pass][half] = inside ? *reinterpret_cast<const uint4*>(from + 4 * half) : uint4{0, 0, 0, 0};
      } else {
        unsigned word[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const bool inside = row < rows && unit * 8 + half * 4 + e < kHeaddim;
          word[e] = inside ? __float_as_uint(from[4 * half + e]) : 0;
        }
        x[pass][half] = {word[0], word[1], word[2], word[3]};
      }
    }
  }
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const auto note = [&] { odd = 1; };
    uint4 &a = x[pass][0], &b = x[pass][1];
    if constexpr (kCleans)
      greatest = fmaxf(greatest, greatest_cleaned<Cleaned>(a, b, note));
    else
      greatest = fmaxf(greatest, greatest_noting_infinity(a, b, note));
  }
  const SplitFactor split(greatest_of_cta<kThreads>(greatest));
  if constexpr (kTold) odd = __syncthreads_or(odd) != 0 ? 1 : 0;
  if (thread == 0) *inverse = split.inverse;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int index = thread + pass * kThreads, row = index / Tile::kUnits, unit = index % Tile::kUnits;
    const auto scaled = [&](unsigned bits) { return __uint_as_float(bits) * split.factor; };
    const uint4 a = x[pass][0], b = x[pass][1];
    uint4 high, low;
    split2(scaled(a.x), scaled(a.y), high.x, low.x);
    split2(scaled(a.z), scaled(a.w), high.y, low.y);
    split2(scaled(b.x), scaled(b.y), high.z, low.z);
    split2(scaled(b.z), scaled(b.w), high.w, low.w);
    unsigned char* const place = to + Tile::offset(row, unit);
    *reinterpret_cast<uint4*>(place) = high;
    *reinterpret_cast<uint4*>(place + Tile::kBytes) = low;
  }
  return kTold ? static_cast<unsigned>(odd) : 0;
}

}  // namespace fattn::tile
