// Products of the backward pass (kernels/v2/backward.h):  S^T = K Q^T    dP^T = V dO^T    dV += P^T dO    dK += dS^T Q
#pragma once

#include "kernels/ptx/barrier.h"
#include "kernels/ptx/ldmatrix.h"
#include "kernels/v2/backward_cta.h"
#include "kernels/v2/fragment_store.h"
#include "kernels/v2/swizzled_tile.h"

namespace fattn::v2 {

// d = A B^T over the whole width: A = kKeys rows of K (V), B = kChunk rows of Q (dO).
template <class Spec>
template <int kInner>
__device__ void Backward<Spec>::multiply_rows(float (&d)[kKeyTiles][kChunkTiles][4], unsigned a_tile, unsigned b_tile,
                                              const BlockAddress<kInner, kInner, LaneOrder::kColumnMajor>& a_at,
                                              const BlockAddress<kInner, kInner, LaneOrder::kRowMajor>& b_at, int b_row) {
#pragma unroll
  for (int k = 0; k < kInner / 16; ++k) {
    unsigned a[kKeyTiles][4];
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) ptx::ldmatrix_x4(a[i], a_at.at(a_tile, 16 * i, k));
#pragma unroll
    for (int j = 0; j < kChunkTiles / 2; ++j) {
      unsigned b[4];
      ptx::ldmatrix_x4(b, b_at.at(b_tile, b_row + 16 * j, k));
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) {
        mma(d[i][2 * j], a[i], b[0], b[1]);
        mma(d[i][2 * j + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// d += A B for 16 inner indices (queries): A = fragments of P^T (dS^T), B = 16 rows of dO (Q).
template <class Spec>
template <int kSpan, int kInner>
__device__ void Backward<Spec>::accumulate(float (&d)[kKeyTiles][kSumTiles][4], const unsigned (&a)[kKeyTiles][4], unsigned b_tile,
                                           const BlockAddress<kInner, kSpan, LaneOrder::kColumnMajor>& b_at, int b_row) {
#pragma unroll
  for (int j = 0; j < kSpan / 16; ++j) {
    unsigned b[4];
    ptx::ldmatrix_x4_trans(b, b_at.at(b_tile, b_row, j));
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
      mma(d[i][2 * j], a[i], b[0], b[1]);
      mma(d[i][2 * j + 1], a[i], b[2], b[3]);
    }
  }
}

// sum += A B for the queries of the other warps of this role: A from shared memory.
template <class Spec>
template <int kSpan, int kInner>
__device__ void Backward<Spec>::accumulate_others(float (&sum)[kKeyTiles][kSumTiles][4], unsigned a_tile, unsigned b_tile,
                                                  const BlockAddress<kInner, kSpan, LaneOrder::kColumnMajor>& b_at) const {
  ptx::bar_sync(role_barrier(), kRoleThreads);
#pragma unroll
  for (int other = 1; other < kGroupWarps; ++other) {
    const int queries = (member + other) % kGroupWarps * kQueries;
    const BlockAddress<kBlockM, kQueries, LaneOrder::kColumnMajor> a_at(lane, key_group * kKeys, queries);
#pragma unroll
    for (int j = 0; j < kQueries / 16; ++j) {
      unsigned a[kKeyTiles][4];
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) ptx::ldmatrix_x4(a[i], a_at.at(a_tile, 16 * i, j));
      accumulate<kSpan, kInner>(sum, a, b_tile + 2 * queries * kInner, b_at, 16 * j);
    }
  }
}

// Puts fragments of a chunk where the other role, or the other warps of the role, read them.
template <class Spec>
__device__ void Backward<Spec>::store_chunk(const FragmentStore<kBlockM, kQueries>& store, unsigned tile, int row,
                                            const unsigned (&bits)[kChunkTiles / 2][kKeyTiles][4]) {
#pragma unroll
  for (int j = 0; j < kChunkTiles / 2; ++j)
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) store.store(tile, 16 * i, row / 16 + j, bits[j][i]);
}

}  // namespace fattn::v2
