// The two warps of a key group of the backward pass in fp32 (kernels/v2/backward_f32.h), of a block of queries, chunk by chunk:
//   values  S^T = K Q^T   P^T = exp(S^T - lse) --- through shared memory, in fp32 --->  keys  dP^T = V dO^T   dS^T = P^T (dP^T - row_sum)
//           dV += P^T dO                                                                      dK += dS^T Q
#pragma once

#include "kernels/pair.h"
#include "kernels/ptx/barrier.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/shared_pair.h"
#include "kernels/tile/split_tile.h"
#include "kernels/v2/backward_f32_cta.h"
#include "kernels/v2/fragment_store.h"
#include "kernels/v2/swizzled_tile.h"

namespace fattn::v2 {

template <class Spec>
__device__ void BackwardF32<Spec>::compute_values(float (&dv)[kKeyTiles][kSumTiles][4], int first_query, bool masked,
                                                  [[maybe_unused]] int head) const {
  const int lane = this_lane(), key_group = this_group();
  const BlockAddress<kWidth, kWidth, LaneOrder::kColumnMajor> k_rows(lane, key_group * kKeys, 0);
  const BlockAddress<kWidth, kWidth, LaneOrder::kRowMajor> q_rows(lane, 0, 0);
  const BlockAddress<kWidthV, kColumnsV, LaneOrder::kColumnMajor> dout_columns(lane, 0, part * kColumnsV);
#pragma unroll 1
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int row = chunk * kChunk;
    float s[kKeyTiles][kChunkTiles][4];
    multiply_rows<TileK, TileQ, kWidth>(s, shared, q_tile() + static_cast<unsigned>(row * TileQ::kPitch), k_rows, q_rows, 0);  // S^T = K Q^T
    if (const unsigned keys = infinite_keys(); keys != 0) [[unlikely]]
      spoil(s, keys);
    const auto send = [&](const float(&x)[kKeyTiles][kChunkTiles][4]) {
      const unsigned p_at = p_slot(chunk);
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
        for (int j = 0; j < kChunkTiles; ++j)
          ptx::st_shared_16(p_at + (i * kChunkTiles + j) * 512, uint4{__float_as_uint(x[i][j][0]), __float_as_uint(x[i][j][1]),
                                                                      __float_as_uint(x[i][j][2]), __float_as_uint(x[i][j][3])});
    };
    if constexpr (kCapped || kPair.terms() || kPair.dropout) {
      float sent[kKeyTiles][kChunkTiles][4];
      pair_weights(s, sent, lse_at() + 4 * row, head, first_query + row);
      send(sent);  // what the mask hides the second warp hides again
      if (masked) hide(s, first_query + row);
    } else {
      weights(s, lse_at() + 4 * row);
      if (masked) hide(s, first_query + row);
      send(s);
    }
    ptx::bar_sync(weights_barrier(chunk), 64);
    const Fragments fragments(s, kWeightFactor);
    accumulate<TileDout, kWidthV, kColumnsV>(dv, fragments, dout_tile() + static_cast<unsigned>(row * TileDout::kPitch), dout_columns,
                                             1 / kWeightFactor, dout_inverse);  // dV += P^T dO
  }
}

template <class Spec>
__device__ void BackwardF32<Spec>::compute_keys(float (&dk)[kKeyTiles][kSumTiles][4], int first_query, bool masked, [[maybe_unused]] int head) const {
  const int lane = this_lane(), key_group = this_group();
  const BlockAddress<kWidthV, kWidthV, LaneOrder::kColumnMajor> v_rows(lane, key_group * kKeys, 0);
  const BlockAddress<kWidthV, kWidthV, LaneOrder::kRowMajor> dout_rows(lane, 0, 0);
  const BlockAddress<kWidth, kColumns, LaneOrder::kColumnMajor> q_columns(lane, 0, part * kColumns);
  const FragmentStore<kBlockM, kBlockM> ds_store(lane, key_group * kKeys, 0);
#pragma unroll 1
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int row = chunk * kChunk;
    float ds[kKeyTiles][kChunkTiles][4];
    multiply_rows<TileV, TileDout, kWidthV>(ds, v_tile(), dout_tile() + static_cast<unsigned>(row * TileDout::kPitch), v_rows, dout_rows,
                                            0);  // dP^T = V dO^T
    ptx::bar_sync(weights_barrier(chunk), 64);
    const unsigned p_at = p_slot(chunk);
    const unsigned row_sum_at = this->row_sum_at() + 4 * row;
    const float dout_factor = tile::inverse_of(dout_inverse),
                value_gradient_factor = tile::inverse_of(value_inverse()) * (kGradientFactor * (kPair.dropout ? kept_share() : 1.0f));
#pragma unroll
    for (int j = 0; j < kChunkTiles; ++j) {
      const float2 row_sum = ptx::ld_shared_f32x2(row_sum_at + 4 * (8 * j + lane % 4 * 2));
      const float scaled[2] = {row_sum.x * dout_factor * value_gradient_factor, row_sum.y * dout_factor * value_gradient_factor};
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) {
        const uint4 bits = ptx::ld_shared_16(p_at + (i * kChunkTiles + j) * 512);
        const float weight[4] = {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z), __uint_as_float(bits.w)};
#pragma unroll
        for (int e = 0; e < 4; ++e) {  // dS^T = P^T (dP^T - row_sum)
          if constexpr (kPair.dropout) {
            const bool dropped = __float_as_uint(weight[e]) >> 31 != 0;
            const bool hidden = kHides && __float_as_uint(weight[e]) == 0x80000000u;
            const float gradient = fmaf(dropped ? 0.0f : ds[i][j][e], kGradientFactor, -scaled[e % 2]);
            ds[i][j][e] = hidden ? 0.0f : fabsf(weight[e]) * gradient;
          } else {
            ds[i][j][e] = weight[e] * fmaf(ds[i][j][e], kGradientFactor, -scaled[e % 2]);
            if (kHides && __float_as_uint(weight[e]) == 0x80000000u) ds[i][j][e] = 0;
          }
        }
      }
    }
    if (masked) hide(ds, first_query + row);
    if constexpr (kPair.dbias)
      if (part == 0)  // CTAs that share their keys have the same dS^T
        add_to_dbias(ds, head, first_query + row, masked, dropout_scale() / kGradientFactor, dout_inverse * value_inverse());
    const Fragments fragments(ds, 1.0f);
#pragma unroll
    for (int depth = 0; depth < kDepths; ++depth)
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) store_ds(ds_store, 16 * i, chunk * kDepths + depth, fragments.high[depth][i], fragments.low[depth][i]);
    accumulate<TileQ, kWidth, kColumns>(dk, fragments, q_tile() + static_cast<unsigned>(row * TileQ::kPitch), q_columns,
                                        query_inverse / kGradientFactor, dout_inverse * value_inverse());  // dK += dS^T Q
  }
}

template <class Spec>
__device__ void BackwardF32<Spec>::store_ds(const FragmentStore<kBlockM, kBlockM>& to, int row, int block, const unsigned (&high)[4],
                                            const unsigned (&low)[4]) const {
  to.store(ds_tile(), row, block, high);
  to.store(ds_tile() + TileDs::kBytes, row, block, low);
}

template <class Spec>
__device__ void BackwardF32<Spec>::clear_ds() const {
  const FragmentStore<kBlockM, kBlockM> ds_store(this_lane(), this_group() * kKeys, 0);
  const unsigned zeros[4] = {};
#pragma unroll 1
  for (int j = 0; j < kBlockM / 16; ++j)
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) store_ds(ds_store, 16 * i, j, zeros, zeros);
}

}  // namespace fattn::v2
