// dQ += dS K of the backward pass in fp32 (kernels/v2/backward_f32.h), of a block of queries, by all warps, added up in fp32.
#pragma once

#include "kernels/pair.h"
#include "kernels/ptx/ldmatrix.h"
#include "kernels/ptx/semaphore.h"
#include "kernels/tile/split_product.h"
#include "kernels/v2/backward_f32_cta.h"
#include "kernels/v2/dq_accum.h"
#include "kernels/v2/swizzled_tile.h"
#include "kernels/v2/workspace.h"

namespace fattn::v2 {

// dQ of one block, from everybody's dS^T.
template <class Spec>
__device__ void BackwardF32<Spec>::compute_dq(Step step) const {
  const auto& p = found_params();
  const int lane = this_lane(), warp = this_warp(), dq_row = warp % kDqRowWarps * kDqRows,
            dq_column = part * kColumns + warp / kDqRowWarps * kDqColumns;
  const BlockAddress<kBlockM, kDqRows, LaneOrder::kRowMajor> ds_columns(lane, 0, dq_row);
  const BlockAddress<kWidth, kDqColumns, LaneOrder::kColumnMajor> k_columns(lane, 0, dq_column);
  const long long batch_head = static_cast<long long>(batch) * p.nheads + step.head;
  const int first_row = step.block * kBlockM + dq_row;
  float* const accum = p.dq_accum + workspace_accum<kPair, kWidth>(p, batch_head, step.head, dq_accum_head(p.seqlen_q, kWidth)) +
                       static_cast<long long>(first_row / kDqAccumRows) * (kDqAccumRows * kWidth) + dq_column * kDqAccumRows;
  int* const turn = Spec::kDeterministic
                        ? p.dq_semaphore + 1 + workspace_head<kPair>(batch_head, step.head) * workspace_blocks<kPair, kBlockM>(p) + step.block
                        : nullptr;
  constexpr int kTiles = kDqRows / 16;
  const float factor = key_inverse() / kGradientFactor * dropout_scale(), factor2 = dout_inverse * value_inverse();
#pragma unroll
  for (int first = 0; first < kDqColumns; first += kDqSpan) {
    float high[kDqSpan / 8][kTiles][4], low[kDqSpan / 8][kTiles][4];
    clear(high);
    clear(low);
#pragma unroll
    for (int k = 0; k < kBlockN / 16; ++k) {  // dQ = dS K
      unsigned a_high[kTiles][4], a_low[kTiles][4];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        ptx::ldmatrix_x4_trans(a_high[i], ds_columns.at(ds_tile(), 16 * k, i));
        ptx::ldmatrix_x4_trans(a_low[i], ds_columns.at(ds_tile() + TileDs::kBytes, 16 * k, i));
      }
#pragma unroll
      for (int j = 0; j < kDqSpan / 16; ++j) {
        unsigned b_high[4], b_low[4];
        ptx::ldmatrix_x4_trans(b_high, k_columns.at(shared, 16 * k, first / 16 + j));
        ptx::ldmatrix_x4_trans(b_low, k_columns.at(shared + TileK::kBytes, 16 * k, first / 16 + j));
#pragma unroll
        for (int half = 0; half < 2; ++half)
          tile::multiply_split(high[2 * j + half], low[2 * j + half], a_high, a_low, b_high + 2 * half, b_low + 2 * half);
      }
    }
    if (Spec::kDeterministic && first == 0) {  // lower key blocks first: the same order of additions in every run
      if (this_thread() == 0) {
        while (ptx::ld_acquire(turn) < nth_key_block(step.block) * kParts) __nanosleep(64);
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (first_row + 16 * i < seqlen_q()) {
#pragma unroll
        for (int j = 0; j < kDqSpan / 8; ++j) {
          float dq[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) dq[e] = (high[j][i][e] + low[j][i][e]) * factor * factor2;
          add_to_dq(accum + 16 * i * kWidth + (first / 8 + j) * 128, lane, dq);
        }
      }
    }
  }
  if constexpr (Spec::kDeterministic) {
    __threadfence();
    __syncthreads();
    if (this_thread() == 0) ptx::red_add_release(turn, 1);
  }
}

}  // namespace fattn::v2
