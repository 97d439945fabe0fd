// Products of split operands (tile/split_tile.h): three matrix instructions of fp16 each.
#pragma once

#include "kernels/ptx/mma.h"

namespace fattn::tile {

// d += a b, 16 x 16 by 16 x 8, of operands that are whole numbers of fp16.
__device__ __forceinline__ void mma_f16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { ptx::mma_m16n8k16_f16(d, a, b0, b1); }

// For products over a whole row: the sum of high * high apart from that of the small products, so that fewer sums are rounded towards zero at the
// size of the result. `b` are two 16 x 8 operands.
template <int kRowTiles>
__device__ __forceinline__ void multiply_split(float (&high)[kRowTiles][4], float (&low)[kRowTiles][4], const unsigned (&a_high)[kRowTiles][4],
                                               const unsigned (&a_low)[kRowTiles][4], const unsigned* b_high, const unsigned* b_low) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
    mma_f16(low[i], a_high[i], b_low[0], b_low[1]);
    mma_f16(high[i], a_high[i], b_high[0], b_high[1]);
  }
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) mma_f16(low[i], a_low[i], b_high[0], b_high[1]);
}

// For a product over 16 * kChunks inner indices whose A is in registers: t = a b for two operands B of 8 columns each. The small products come first:
// what is rounded towards zero is then small for all but the last kChunks.
template <int kRowTiles, int kChunks>
__device__ __forceinline__ void product_split(float (&t)[kRowTiles][2][4], const unsigned (&a_high)[kChunks][kRowTiles][4],
                                              const unsigned (&a_low)[kChunks][kRowTiles][4], const unsigned (&b_high)[kChunks][4],
                                              const unsigned (&b_low)[kChunks][4]) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) t[i][half][0] = t[i][half][1] = t[i][half][2] = t[i][half][3] = 0;
  }
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) mma_f16(t[i][half], a_high[chunk][i], b_low[chunk][2 * half], b_low[chunk][2 * half + 1]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) mma_f16(t[i][half], a_low[chunk][i], b_high[chunk][2 * half], b_high[chunk][2 * half + 1]);
    }
  }
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) mma_f16(t[i][half], a_high[chunk][i], b_high[chunk][2 * half], b_high[chunk][2 * half + 1]);
    }
  }
}

}  // namespace fattn::tile
