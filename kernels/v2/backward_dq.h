// dQ += dS K of the backward pass (kernels/v2/backward.h), of a block of queries, by all warps, added up in fp32.
#pragma once

#include "kernels/mask.h"
#include "kernels/pair.h"
#include "kernels/ptx/ldmatrix.h"
#include "kernels/ptx/reduce.h"
#include "kernels/ptx/semaphore.h"
#include "kernels/v2/backward_cta.h"
#include "kernels/v2/careful.h"
#include "kernels/v2/dq_accum.h"
#include "kernels/v2/swizzled_tile.h"
#include "kernels/v2/workspace.h"

namespace fattn::v2 {

// In one piece: with its two products in functions, causal kernels of headdim 64 had other machine code.
// From everybody's dS^T. keys_nonfinite: there is Inf or NaN among the keys.
template <class Spec>
__device__ void Backward<Spec>::compute_dq(Step step, int stage, bool keys_nonfinite) const {
  const int lane = ptx::opaque(thread) & 31, dq_row = warp % kDqRowWarps * kDqRows, dq_column = warp / kDqRowWarps * kDqColumns;
  const BlockAddress<kBlockM, kDqRows, LaneOrder::kRowMajor> ds_columns(lane, 0, dq_row);
  const BlockAddress<kWidth, kDqColumns, LaneOrder::kColumnMajor> k_columns(lane, 0, dq_column);
  const long long head = workspace_head<kPair>(static_cast<long long>(batch) * p.nheads + step.head, step.head);
  const int first_row = step.block * kBlockM + dq_row;
  const unsigned row_blocks = workspace_blocks<kPair, kDqAccumRows>(p);
  float* const accum = p.dq_accum + (head * row_blocks + first_row / kDqAccumRows) * (kDqAccumRows * kWidth) + dq_column * kDqAccumRows;
  int* const turn = Spec::kDeterministic ? p.dq_semaphore + 1 + head * workspace_blocks<kPair, kBlockM>(p) + step.block : nullptr;
#pragma unroll
  for (int first = 0; first < kDqColumns; first += kDqSpan) {
    float dq[kDqRows / 16][kDqSpan / 8][4];
    clear(dq);
    if ((kMasked || kHides) && keys_nonfinite &&
        (kHides || first_key + kBlockN - 1 > step.block * kBlockM + diagonal ||
         (kWindow && first_key < step.block * kBlockM + kBlockM - 1 + left_diagonal))) {
#pragma unroll 1
      for (int k = 0; k < kBlockN / 16; ++k) {
        unsigned a[kDqRows / 16][4], found = 0;
#pragma unroll
        for (int i = 0; i < kDqRows / 16; ++i) ptx::ldmatrix_x4_trans(a[i], ds_columns.at(ds_tile(stage), 16 * k, i));
#pragma unroll
        for (int j = 0; j < kDqSpan / 16; ++j) {
          unsigned b[4];
          ptx::ldmatrix_x4_trans(b, k_columns.at(shared, 16 * k, first / 16 + j));
#pragma unroll
          for (unsigned& pair : b) {
            const unsigned nonfinite = nonfinite_halves<Element>(pair);
            found |= nonfinite;
            pair &= ~nonfinite;
          }
#pragma unroll
          for (int i = 0; i < kDqRows / 16; ++i) {
            mma(dq[i][2 * j], a[i], b[0], b[1]);
            mma(dq[i][2 * j + 1], a[i], b[2], b[3]);
          }
        }
        if (ptx::vote_all(found == 0)) continue;
        const int own_query = first_row + lane / 4, own_key = first_key + 16 * k + lane % 4 * 2, reach = own_query + diagonal - own_key;
        [[maybe_unused]] const int lead = kWindow ? reach - diagonal + left_diagonal : 0;
        [[maybe_unused]] const Terms<kPair, Element> terms(p, ptx::opaque(batch), step.head, seqlen_k());
        const bool some = seen_pairs<Element>(a, [&](int i, int half, int key) {
          const int query = 16 * i + 8 * half;
          if (kWindow && key < lead + query) return false;
          if (kMasked && key > reach + query) return false;
          if constexpr (kHides)  // a key behind the last is all zeros
            return own_query + query < p.seqlen_q && own_key + key < seqlen_k() && terms.sees(own_query + query, own_key + key);
          return true;
        });
        if (some) mark<kDqSpan>(dq, a, [&](unsigned(&b)[4], int j) { ptx::ldmatrix_x4_trans(b, k_columns.at(shared, 16 * k, first / 16 + j)); });
      }
    } else
#pragma unroll
      for (int k = 0; k < kBlockN / 16; ++k) {  // dQ = dS K
        unsigned a[kDqRows / 16][4];
#pragma unroll
        for (int i = 0; i < kDqRows / 16; ++i) ptx::ldmatrix_x4_trans(a[i], ds_columns.at(ds_tile(stage), 16 * k, i));
#pragma unroll
        for (int j = 0; j < kDqSpan / 16; ++j) {
          unsigned b[4];
          ptx::ldmatrix_x4_trans(b, k_columns.at(shared, 16 * k, first / 16 + j));
#pragma unroll
          for (int i = 0; i < kDqRows / 16; ++i) {
            mma(dq[i][2 * j], a[i], b[0], b[1]);
            mma(dq[i][2 * j + 1], a[i], b[2], b[3]);
          }
        }
      }
    if (Spec::kDeterministic && first == 0) {  // lower key blocks first: the same order of additions in every run
      if (thread == 0) {
        // Packed sequences whose offsets are out of range may share blocks, which then count too far.
        const auto is_early = [](int x, int own) { return kPair.packed ? x < own : x != own; };
        while (is_early(ptx::ld_acquire(turn), nth_key_block(step.block))) __nanosleep(64);
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kDqRows / 16; ++i) {
      if (first_row + 16 * i < p.seqlen_q) {
#pragma unroll
        for (int j = 0; j < kDqSpan / 8; ++j) add_to_dq(accum + 16 * i * kWidth + (first / 8 + j) * 128, lane, dq[i][j]);
      }
    }
  }
  if constexpr (Spec::kDeterministic) {
    __threadfence();
    __syncthreads();
    if (thread == 0) ptx::red_add_release(turn, 1);
  }
}

}  // namespace fattn::v2
