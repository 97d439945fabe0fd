// dV += P^T dO and dK += dS^T Q of the backward pass (kernels/v2/backward.h) where dO or Q holds Inf or NaN that hidden pairs must not see.
#pragma once

#include "device_abi/lowest.h"
#include "kernels/constants.h"
#include "kernels/mask.h"
#include "kernels/pair.h"
#include "kernels/ptx/barrier.h"
#include "kernels/ptx/ldmatrix.h"
#include "kernels/ptx/reduce.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/v2/backward_cta.h"
#include "kernels/v2/careful.h"
#include "kernels/v2/swizzled_tile.h"

namespace fattn::v2 {

// d = NaN where its rows see an Inf or NaN of 16 rows of B, as `seen` says. B: kSpan columns.
template <class Spec>
template <int kSpan, int kRowTiles, int kColumnTiles, class Load>
__device__ void Backward<Spec>::mark(float (&d)[kRowTiles][kColumnTiles][4], const unsigned (&seen)[kRowTiles][4], const Load& load) {
#pragma unroll
  for (int j = 0; j < kSpan / 16; ++j) {
    unsigned b[4];
    load(b, j);
#pragma unroll
    for (unsigned& pair : b) pair = nonfinite_halves<Element>(pair) & kOnes<Element>;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float count[4] = {0, 0, 0, 0};
        mma(count, seen[i], b[2 * n], b[2 * n + 1]);
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (count[e] != 0) d[i][2 * j + n][e] = kNan;
        ptx::warp_sync();  // no need of it, but the compiler then has fewer operands and counts at once
      }
  }
}

// sum += A B for all queries of a block in which pairs are hidden and whose B holds Inf or NaN, in the order of accumulate() and
// accumulate_others(). Rows without a gradient take no part.
template <class Spec>
template <int kSpan, int kInner>
__device__ void Backward<Spec>::accumulate_careful(float (&sum)[kKeyTiles][kSumTiles][4], unsigned a_tile, unsigned b_tile,
                                                   const BlockAddress<kInner, kSpan, LaneOrder::kColumnMajor>& b_at, unsigned lse_at, int first_query,
                                                   int head) const {
  if constexpr (kExchange)
    ptx::bar_sync(role_barrier(), kRoleThreads);
  else
    ptx::warp_sync();
  const BlockAddress<kBlockM, kBlockM, LaneOrder::kColumnMajor> a_at(lane, key_group * kKeys, 0);
#pragma unroll 1
  for (int step = 0; step < kBlockM / 16; ++step) {
    const int k = (member * (kQueries / 16) + step) % (kBlockM / 16);
    unsigned a[kKeyTiles][4], found = 0;
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) ptx::ldmatrix_x4(a[i], a_at.at(a_tile, 16 * i, k));
#pragma unroll
    for (int j = 0; j < kSpan / 16; ++j) {
      unsigned b[4];
      ptx::ldmatrix_x4_trans(b, b_at.at(b_tile, 16 * k, j));
#pragma unroll
      for (unsigned& pair : b) {
        const unsigned nonfinite = nonfinite_halves<Element>(pair);
        found |= nonfinite;
        pair &= ~nonfinite;
      }
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) {
        mma(sum[i][2 * j], a[i], b[0], b[1]);
        mma(sum[i][2 * j + 1], a[i], b[2], b[3]);
      }
    }
    if (ptx::vote_all(found == 0)) continue;
    const int own_key = first_key + key_group * kKeys + lane / 4, own_query = 16 * k + lane % 4 * 2;
    const int reach = first_query + own_query + diagonal - own_key;
    [[maybe_unused]] const int lead = kWindow ? reach - diagonal + left_diagonal : 0;
    [[maybe_unused]] const Terms<kPair, Element> terms(p, ptx::opaque(batch), head, seqlen_k());
    const bool some = seen_pairs<Element>(a, [&](int i, int half, int query) {
      const int key = 16 * i + 8 * half;
      if (ptx::ld_shared_f32(lse_at + 4 * (own_query + query)) < kLowestLse) return false;
      if (kWindow && key < lead + query) return false;
      if (kMasked && key > reach + query) return false;
      if ((kPair.lengths || kHides) && own_key + key >= seqlen_k()) return false;
      if constexpr (kHides)  // a query behind the last is all zeros
        return first_query + own_query + query < p.seqlen_q && terms.sees(first_query + own_query + query, own_key + key);
      return true;
    });
    if (some) mark<kSpan>(sum, a, [&](unsigned(&b)[4], int j) { ptx::ldmatrix_x4_trans(b, b_at.at(b_tile, 16 * k, j)); });
  }
}

}  // namespace fattn::v2
