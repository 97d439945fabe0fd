// Backward in fp32 on the matrix instructions for fp16, main kernel: the products of v2/backward.h, with every operand split into two fp16 and every
// product made of three (tile/split_tile.h). Level 80.
//
// A CTA owns kBlockN keys of one key head and walks over the blocks of kBlockM queries that see them, of all query heads that share the key head:
//   S^T = K Q^T    P^T = exp(S^T - lse)    dP^T = V dO^T    dS^T = P^T (dP^T - row_sum)    dV += P^T dO    dK += dS^T Q    dQ += dS K
// Each group of keys has two warps. One computes S^T, P^T and dV, the other dP^T, dS^T and dK; P^T goes from the one to the other through shared
// memory as it is, in fp32. dS^T, split, is in shared memory for dQ, which all warps compute together when the block is done. What comes from shared
// memory was scaled by powers of two, the keys once and the queries block by block, and is scaled back when it is added to a gradient in fp32.
//
// With softcap P^T (1 - T^2) goes to the second warp in place of P^T, T the capped scores before they are multiplied by softcap. With features of
// pairs (kernels/pair.h) it is marked by its sign: of a dropped pair the second warp takes nothing of dP^T, and of -0, a pair that bias or mask
// hides, nothing at all. Dropout's scale comes last: dP^T - row_sum is taken in units of it.
//
// Spec: kHeaddim, kHeaddimV; kCausal; kWindow (kCausal is then false); kCapped; kAligned (16-byte copies); kDeterministic; kTile (a BackwardF32Tile);
// kPair, none if it is left out.
//
// The parts, each beside this file, which has their order:
//   backward_f32_place.h     tile, shared memory, loads, splitting      backward_f32_scores.h  P^T and dS
//   backward_f32_cta.h       what a CTA is                              backward_f32_roles.h   P^T, dV | dS^T, dK
//   backward_f32_products.h  products                                   backward_f32_dq.h      dQ
//   backward_f32_store.h     dK and dV leave
#pragma once

#include "device_abi/attention_params.h"
#include "device_abi/backward_f32_layout.h"
#include "kernels/pair.h"
#include "kernels/ptx/async_copy.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/v2/backward_f32_cta.h"
#include "kernels/v2/backward_f32_dq.h"
#include "kernels/v2/backward_f32_products.h"
#include "kernels/v2/backward_f32_roles.h"
#include "kernels/v2/backward_f32_store.h"

namespace fattn::v2 {

// The block behind `now`; kSplitBefore: to the other stage, which nobody reads any more.
template <class Spec>
__device__ void BackwardF32<Spec>::load_next(Step now) {
  const Step next = after(now);
  if (next.head >= (head_k + 1) * p.group) return;
  if constexpr (kSplitBefore) stage ^= 1;
  load_queries(next);
  if constexpr (kSplitBefore) stage ^= 1;
}

template <class Spec>
__device__ void BackwardF32<Spec>::run() {
  take_tile();
  if (kPair.packed && first_key >= p.seqlen_k) return;
  float sum[kKeyTiles][kSumTiles][4];  // dV or dK, by role
  clear(sum);
  if constexpr (kPair.lengths) {
    const float first = first_sum<kPair>(p, batch);
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
      for (int j = 0; j < kSumTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[i][j][e] = first;
  }

  const bool any = first_block() < blocks_end() && (!kPair.lengths || first_key < seqlen_k());  // some query sees these keys
  Step now{head_k * p.group, first_block()};
  if (any) {
    clear_infinite_keys();
    load_keys();
    load_queries(now);
    ptx::cp_async_wait<1>();
    split_keys();
    __syncthreads();  // all have read the greatest numbers
  }
  while (any && now.head < (head_k + 1) * p.group) {
    ptx::cp_async_wait<0>();
    if constexpr (kSplitBefore) {
      __syncthreads();
      split_queries();
      load_next(now);
    } else {
      split_queries();
      __syncthreads();
    }
    const int first_query = now.block * kBlockM, group_key = first_key + this_group() * kKeys;
    const bool hidden = (kMasked && group_key > first_query + kBlockM - 1 + diagonal()) ||
                        (kWindow && group_key + kKeys - 1 < first_query + left_diagonal());  // no query of the block sees a key of the group
    const bool masked = first_key + kBlockN > seqlen_k() || first_query + kBlockM > seqlen_q() ||
                        (kMasked && group_key + kKeys - 1 > first_query + diagonal()) ||
                        (kWindow && group_key < first_query + kBlockM - 1 + left_diagonal());
    if (computes_values()) {
      if (!hidden) compute_values(sum, first_query, masked, now.head);
    } else {
      if (!hidden)
        compute_keys(sum, first_query, masked, now.head);
      else
        clear_ds();
    }
    __syncthreads();
    if constexpr (kSplitBefore) {
      compute_dq(now);
      stage ^= 1;
    } else {
      load_next(now);
      compute_dq(now);
    }
    now = after(now);
  }
  if (computes_values())
    store_gradient<false>(sum, dropout_scale());
  else
    store_gradient<true>(sum, p.softmax_scale * dropout_scale());
}

template <class Spec>
__device__ __forceinline__ void backward_f32(const AttentionParams& p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  if constexpr (kPairOf<Spec>.packed) {
    OwnParams own{pairs_of(p), p};
    BackwardF32<Spec>(own, ptx::shared_address(shared_memory)).run();
  } else {
    BackwardF32<Spec>(p, ptx::shared_address(shared_memory)).run();
  }
}

// With q and dout split before.
template <class Spec>
__device__ __forceinline__ void backward_f32(const AttentionParams& p, const BackwardF32Parts& parts) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  if constexpr (kPairOf<Spec>.packed) {
    OwnParams own{pairs_of(p), p};
    BackwardF32<Spec>(own, ptx::shared_address(shared_memory), parts).run();
  } else {
    BackwardF32<Spec>(p, ptx::shared_address(shared_memory), parts).run();
  }
}

}  // namespace fattn::v2
