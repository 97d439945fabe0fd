// The two roles of the backward pass (kernels/v2/backward.h), of a block of queries, chunk by chunk:
//   values  S^T = K Q^T   P^T = exp2(S^T - lse) --- through shared memory --->  keys  dP^T = V dO^T   dS^T = P^T (dP^T - row_sum)
//           dV += P^T dO                                                              dK += dS^T Q
// With gradients in fp32 (kWholeWeights) P^T passes in two parts, one after the other through the same place.
#pragma once

#include "device_abi/lowest.h"
#include "kernels/constants.h"
#include "kernels/pair.h"
#include "kernels/ptx/barrier.h"
#include "kernels/ptx/ldmatrix.h"
#include "kernels/ptx/reduce.h"
#include "kernels/score.h"
#include "kernels/v2/backward_cta.h"
#include "kernels/v2/careful.h"
#include "kernels/v2/fragment_store.h"
#include "kernels/v2/swizzled_tile.h"

namespace fattn::v2 {

// The first role.
template <class Spec>
__device__ void Backward<Spec>::compute_values(float (&dv)[kKeyTiles][kSumTiles][4], int stage, int first_query, bool masked, int head) const {
  const int lane = ptx::opaque(this->lane);
  const BlockAddress<kWidth, kWidth, LaneOrder::kColumnMajor> k_rows(lane, key_group * kKeys, 0);
  const BlockAddress<kWidth, kWidth, LaneOrder::kRowMajor> q_rows(lane, member * kQueries, 0);
  const BlockAddress<kWidthV, kColumnsV, LaneOrder::kColumnMajor> dout_columns(lane, 0, member * kColumnsV);
  const FragmentStore<kBlockM, kQueries> p_store(lane, key_group * kKeys, member * kQueries);
  const unsigned own_dout = dout_tile(stage) + 2 * member * kQueries * kWidthV;
  [[maybe_unused]] const bool plain = kByDocument && of_one_document(first_query);
  // An Inf or NaN in a row of dO makes its row_sum one.
  const bool careful = (((kMasked || kPair.lengths) && masked) || (kHides && !plain)) &&
                       any_nonfinite(shared + kTile.row_sum_offset() + stage * kTile.row_bytes(), kBlockM, lane);
#pragma unroll 1
  for (int row = 0; row < kQueries; row += kChunk) {
    const int query = member * kQueries + row;
    unsigned p_bits[kChunkTiles / 2][kKeyTiles][4], sloped[kChunkTiles / 2][kKeyTiles][4], rest[kChunkTiles / 2][kKeyTiles][4];
    {
      float s[kKeyTiles][kChunkTiles][4];
      clear(s);
      multiply_rows<kWidth>(s, shared, q_tile(stage), k_rows, q_rows, row);  // S^T = K Q^T
      ptx::warp_sync();  // no need of it, but the compiler then keeps this apart from the product: together they want too many registers
      if constexpr (kCapped) cap_scores<true>(reinterpret_cast<float(&)[kKeyTiles * kChunkTiles * 4]>(s), features_of(p).score_factor);
      const unsigned lse_at = lse_rows(stage) + 4 * query;
      if constexpr (kByDocument) {
        if (plain) {
          weights(s, lse_at, p_bits, sloped, rest);
          if constexpr (!kCapped && !kFine) copy(sloped, p_bits);
        } else {
          pair_weights(s, stage, lse_at, head, first_query, query, p_bits, sloped, rest);
        }
      } else if constexpr (kPair.terms() || kPair.dropout) {
        pair_weights(s, stage, lse_at, head, first_query, query, p_bits, sloped, rest);
      } else {
        weights(s, lse_at, p_bits, sloped, rest);
      }
      if (masked) hide(p_bits, first_query + query);
      if ((kTwoForms || kHides) && masked) hide(sloped, first_query + query);
      if (kWholeWeights && masked) hide(rest, first_query + query);
    }
    store_chunk(p_store, p_tile(), row, kTwoForms || kHides ? sloped : p_bits);
    ptx::bar_sync(weights_barrier(row / kChunk), kAllThreads);
    if constexpr (kWholeWeights) {
      ptx::bar_sync(weights_barrier(row / kChunk), kAllThreads);  // the second role has read it
      store_chunk(p_store, p_tile(), row, rest);
      ptx::bar_sync(weights_barrier(row / kChunk), kAllThreads);
    }
    if constexpr (kRoundedLater) round(p_bits);
    if (read_again(masked)) {  // once the second role has read it, P^T may be there, for those who read it back
      ptx::bar_sync(weights_barrier(row / kChunk), kAllThreads);
      if (kExchange || careful) store_chunk(p_store, p_tile(), row, p_bits);
    }
    if (careful) continue;
#pragma unroll
    for (int j = 0; j < kChunkTiles / 2; ++j) accumulate<kColumnsV, kWidthV>(dv, p_bits[j], own_dout, dout_columns, row + 16 * j);  // dV += P^T dO
  }
  if (careful)
    accumulate_careful<kColumnsV, kWidthV>(dv, p_tile(), dout_tile(stage), dout_columns, lse_rows(stage), first_query, head);
  else if constexpr (kExchange)
    accumulate_others<kColumnsV, kWidthV>(dv, p_tile(), dout_tile(stage), dout_columns);
}

// The second role.
template <class Spec>
__device__ void Backward<Spec>::compute_keys(float (&dk)[kKeyTiles][kSumTiles][4], int stage, int first_query, bool masked, int head) const {
  const int lane = ptx::opaque(this->lane);
  const BlockAddress<kWidthV, kWidthV, LaneOrder::kColumnMajor> v_rows(lane, key_group * kKeys, 0);
  const BlockAddress<kWidthV, kWidthV, LaneOrder::kRowMajor> dout_rows(lane, member * kQueries, 0);
  const BlockAddress<kWidth, kColumns, LaneOrder::kColumnMajor> q_columns(lane, 0, member * kColumns);
  const BlockAddress<kBlockM, kQueries, LaneOrder::kColumnMajor> p_read(lane, key_group * kKeys, member * kQueries);
  const FragmentStore<kBlockM, kQueries> ds_store(lane, key_group * kKeys, member * kQueries);
  const unsigned own_q = q_tile(stage) + 2 * member * kQueries * kWidth;
  // An Inf or NaN in a row of Q makes its lse one, unless scores are capped, or biases in the place of all of them leave it low.
  bool careful = ((kMasked || kPair.lengths) && masked) || kHides;
  if (!kCapped) careful = careful && any_nonfinite(lse_rows(stage), kBlockM, lane, kPair.bias != 0 ? kLowestLse : -kInfinity);
  if (kCapped || kPair.bias != 0) careful = careful && !ptx::vote_all(!share_nonfinite<Element>(q_tile(stage), kTile.q_bytes(), lane, 32));
#pragma unroll 1
  for (int row = 0; row < kQueries; row += kChunk) {
    const int query = member * kQueries + row;
    unsigned ds_bits[kChunkTiles / 2][kKeyTiles][4];
    {
      float dp[kKeyTiles][kChunkTiles][4];
      clear(dp);
      multiply_rows<kWidthV>(dp, shared + kTile.v_offset(), dout_tile(stage), v_rows, dout_rows, row);  // dP^T = V dO^T
      ptx::bar_sync(weights_barrier(row / kChunk), kAllThreads);
      const auto read = [&](unsigned(&bits)[4], int j, int i) { ptx::ldmatrix_x4(bits, p_read.at(p_tile(), 16 * i, row / 16 + j)); };
      if constexpr (!kReadLate) {
#pragma unroll
        for (int j = 0; j < kChunkTiles / 2; ++j)
#pragma unroll
          for (int i = 0; i < kKeyTiles; ++i) read(ds_bits[j][i], j, i);
        if (read_again(masked)) ptx::bar_sync(weights_barrier(row / kChunk), kAllThreads);
      }
      const unsigned row_sum_at = shared + kTile.row_sum_offset() + stage * kTile.row_bytes() + 4 * query;
      if constexpr (kWholeWeights) {
        ptx::bar_sync(weights_barrier(row / kChunk), kAllThreads);  // what rounding took from P^T is there
        whole_score_gradients(dp, row_sum_at, ds_bits, read);
        ptx::bar_sync(weights_barrier(row / kChunk), kAllThreads);
      } else if constexpr (kHides || kPair.dropout || kPair.dbias)
        pair_score_gradients(dp, row_sum_at, ds_bits);
      else if constexpr (kReadLate) {
        score_gradients(dp, row_sum_at, ds_bits, read);
        if (read_again(masked)) ptx::bar_sync(weights_barrier(row / kChunk), kAllThreads);
      } else
        score_gradients(dp, row_sum_at, ds_bits, [](const auto&, int, int) {});
      if (masked) hide(ds_bits, first_query + query);
      if constexpr (kPair.dbias) add_to_dbias(dp, head, first_query + query, masked);
    }
    store_chunk(ds_store, ds_tile(stage), row, ds_bits);
    if (careful) continue;
#pragma unroll
    for (int j = 0; j < kChunkTiles / 2; ++j) accumulate<kColumns, kWidth>(dk, ds_bits[j], own_q, q_columns, row + 16 * j);  // dK += dS^T Q
  }
  if (careful)
    accumulate_careful<kColumns, kWidth>(dk, ds_tile(stage), q_tile(stage), q_columns, lse_rows(stage), first_query, head);
  else if constexpr (kExchange)
    accumulate_others<kColumns, kWidth>(dk, ds_tile(stage), q_tile(stage), q_columns);
}

template <class Spec>
__device__ void Backward<Spec>::clear_ds(int stage) const {
  const FragmentStore<kBlockM, kQueries> ds_store(lane, key_group * kKeys, member * kQueries);
  const unsigned zeros[4] = {};
#pragma unroll
  for (int j = 0; j < kQueries / 16; ++j)
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) ds_store.store(ds_tile(stage), 16 * i, j, zeros);
}

}  // namespace fattn::v2
