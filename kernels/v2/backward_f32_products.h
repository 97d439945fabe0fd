// Products of the backward pass in fp32 (kernels/v2/backward_f32.h), each of three:  S^T = K Q^T    dP^T = V dO^T    dV += P^T dO    dK += dS^T Q
#pragma once

#include "kernels/ptx/ldmatrix.h"
#include "kernels/tile/split_product.h"
#include "kernels/tile/split_tile.h"
#include "kernels/v2/backward_f32_cta.h"
#include "kernels/v2/swizzled_tile.h"

namespace fattn::v2 {

// d = A B^T over the whole width: A = kKeys rows of K (V), B = kChunk rows of Q (dO).
template <class Spec>
template <class TileA, class TileB, int kInner>
__device__ void BackwardF32<Spec>::multiply_rows(float (&d)[kKeyTiles][kChunkTiles][4], unsigned a_tile, unsigned b_tile,
                                                 const BlockAddress<kInner, kInner, LaneOrder::kColumnMajor>& a_at,
                                                 const BlockAddress<kInner, kInner, LaneOrder::kRowMajor>& b_at, int b_row) {
  float high[kChunkTiles][kKeyTiles][4], low[kChunkTiles][kKeyTiles][4];
  clear(high);
  clear(low);
#pragma unroll
  for (int k = 0; k < kInner / 16; ++k) {
    unsigned a_high[kKeyTiles][4], a_low[kKeyTiles][4];
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
      ptx::ldmatrix_x4(a_high[i], a_at.at(a_tile, 16 * i, k));
      ptx::ldmatrix_x4(a_low[i], a_at.at(a_tile + TileA::kBytes, 16 * i, k));
    }
#pragma unroll
    for (int j = 0; j < kChunkTiles / 2; ++j) {
      unsigned b_high[4], b_low[4];
      ptx::ldmatrix_x4(b_high, b_at.at(b_tile, b_row + 16 * j, k));
      ptx::ldmatrix_x4(b_low, b_at.at(b_tile + TileB::kBytes, b_row + 16 * j, k));
#pragma unroll
      for (int half = 0; half < 2; ++half)
        tile::multiply_split(high[2 * j + half], low[2 * j + half], a_high, a_low, b_high + 2 * half, b_low + 2 * half);
    }
  }
#pragma unroll
  for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
    for (int j = 0; j < kChunkTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) d[i][j][e] = high[j][i][e] + low[j][i][e];
}

// sum += A B * factor * factor2 for kChunk queries, in kSpan columns: A = P^T (dS^T), B = rows of dO (Q).
template <class Spec>
template <class TileB, int kInner, int kSpan>
__device__ void BackwardF32<Spec>::accumulate(float (&sum)[kKeyTiles][kSumTiles][4], const Fragments& a, unsigned b_tile,
                                              const BlockAddress<kInner, kSpan, LaneOrder::kColumnMajor>& b_at, float factor, float factor2) {
#pragma unroll
  for (int j = 0; j < kSpan / 16; ++j) {
    unsigned b_high[kDepths][4], b_low[kDepths][4];
#pragma unroll
    for (int depth = 0; depth < kDepths; ++depth) {
      ptx::ldmatrix_x4_trans(b_high[depth], b_at.at(b_tile, 16 * depth, j));
      ptx::ldmatrix_x4_trans(b_low[depth], b_at.at(b_tile + TileB::kBytes, 16 * depth, j));
    }
    float t[kKeyTiles][2][4];
    tile::product_split(t, a.high, a.low, b_high, b_low);
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[i][2 * j + half][e] = fmaf(t[i][half][e] * factor, factor2, sum[i][2 * j + half][e]);
  }
}

}  // namespace fattn::v2
