// Backward, algorithm v2 (FlashAttention-2), main kernel: dk and dv of a block of keys, and its share of dq, which is added up in fp32.
//
// A CTA owns kBlockN keys of one key head and walks over the blocks of kBlockM queries that see them, of all query heads that share the key head.
// Scores are computed transposed (keys are rows), because then the accumulators of P^T and dS^T are, in their registers, the A operands of
//   S^T = K Q^T    P^T = exp2(S^T - lse)    dP^T = V dO^T    dS^T = P^T (dP^T - row_sum)    dV += P^T dO    dK += dS^T Q    dQ += dS K
// Warps form groups; a group owns some of the CTA's keys. In a group one half of the warps computes S^T, P^T and dV, the other dP^T, dS^T and dK:
// all they share is P^T, which goes from the one to the other through shared memory. So a warp holds one accumulator of the keys' gradients and one
// of scores, which allows larger tiles, and of the two warps of a scheduler one multiplies while the other takes exponentials. Warps of the same
// role in a group split the queries of a block and then the columns of dV (dK); what they need of each other's P^T (dS^T) they read back.
// dS^T is in shared memory in any case, for dQ, which all warps compute together one block later, when one barrier a block has made it visible
// (pipelined; otherwise in the same block, with a barrier more).
//
// P^T passes with more digits than the dtype has (kernels/fine_weights.h), for dS^T will be rounded itself. What dV takes is rounded from it in the
// same registers, or made beside it where what passes is another thing than P^T, and goes to where warps read it back once the second role has read.
//
// With softcap dS^T = P^T (1 - T^2) (dP^T - row_sum), T = tanh(...) the capped scores before they are multiplied by softcap: P^T (1 - T^2) goes to
// the second role in place of P^T.
//
// With features of pairs (kernels/pair.h) what goes to the second role is marked by its sign, which weights do not need: of a dropped pair it takes
// nothing of dP^T, and of -0, a pair that bias or mask hides or that is of a row without a gradient, nothing at all.
//
// Spec: Element; kLevel (75, 80); kHeaddim, kHeaddimV; kCausal; kWindow (kCausal is then false); kCapped; kAligned (16-byte copies); kDeterministic;
// kTile (a BackwardTile); kPair, none if it is left out; kStaged: bias and mask of pairs come through shared memory (kernels/v2/term_tile.h), false
// if it is left out.
//
// The parts, each beside this file, which has their order:
//   backward_place.h     tile, shared memory, loads      backward_scores.h     P^T and dS^T
//   backward_cta.h       what a CTA is                   backward_roles.h      P^T, dV | dS^T, dK
//   backward_products.h  products                        backward_nonfinite.h  products that meet Inf or NaN
//   backward_dq.h        dQ                              backward_store.h      dK and dV leave
#pragma once

#include "device_abi/attention_params.h"
#include "kernels/pair.h"
#include "kernels/ptx/reduce.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/v2/backward_cta.h"
#include "kernels/v2/backward_dq.h"
#include "kernels/v2/backward_nonfinite.h"
#include "kernels/v2/backward_products.h"
#include "kernels/v2/backward_roles.h"
#include "kernels/v2/backward_store.h"
#include "kernels/v2/careful.h"
#include "kernels/v2/workspace.h"

namespace fattn::v2 {

// In one piece: with its end or the middle of a block in functions, kernels of headdim 64 and level 75 had other machine code.
template <class Spec>
__device__ void Backward<Spec>::run() {
  take_tile();
  if (kPair.packed && first_key >= p.seqlen_k) return;
  if constexpr (kByIds) narrow();

  bool keys_nonfinite = false;         // Inf or NaN among the keys; asked under a mask only
  float sum[kKeyTiles][kSumTiles][4];  // dV or dK, by role
  clear(sum);
  if constexpr (kPair.lengths) fill(sum, first_sum<kPair>(p, batch));

  // S^T, P^T of one block; dV. Or dP^T, dS^T; dK.
  const auto compute_block = [&](Step step, int stage) {
    const int first_query = step.block * kBlockM, group_key = first_key + key_group * kKeys;
    const bool hidden = (kMasked && group_key > first_query + kBlockM - 1 + diagonal) ||
                        (kWindow && group_key + kKeys - 1 < first_query + left_diagonal);  // no query of the block sees a key of the group
    const bool masked = first_key + kBlockN > seqlen_k() || first_query + kBlockM > p.seqlen_q ||
                        (kMasked && group_key + kKeys - 1 > first_query + diagonal) ||
                        (kWindow && group_key < first_query + kBlockM - 1 + left_diagonal);
    if (values) {
      if (!hidden) compute_values(sum, stage, first_query, masked, step.head);
    } else {
      if (!hidden)
        compute_keys(sum, stage, first_query, masked, step.head);
      else
        clear_ds(stage);
    }
  };

  // ---- the walk over query blocks ----
  // No query sees the keys of a tile behind a batch entry's last.
  const int steps = kPair.lengths && first_key >= seqlen_k() ? 0 : max(0, blocks_end() - first_block) * p.group;
  Step now{head_k * p.group, first_block};
  if (steps > 0) {
    load_keys();
    load_queries(now, 0);
    commit();
  }
  if ((kMasked || kHides) && steps > 0) {
    wait_for_loads();
    keys_nonfinite = ptx::bar_or(share_nonfinite<Element>(shared, kTile.k_bytes(), thread, kThreads));
  }
  for (int i = 0; i < (kPipelined && steps > 0 ? steps + 1 : steps); ++i, now = after(now)) {
    wait_for_loads();
    if constexpr (kPipelined) {
      if (i + 1 < steps) {
        load_queries(after(now), (i + 1) % 2);
        commit();
      }
      const bool late = !Spec::kDeterministic && values;
      if (i > 0 && !late) compute_dq(before(now), (i + 1) % 2, keys_nonfinite);
      if (i < steps) compute_block(now, i % 2);
      if (i > 0 && late) compute_dq(before(now), (i + 1) % 2, keys_nonfinite);
    } else {
      compute_block(now, 0);
      __syncthreads();
      if (i + 1 < steps) {
        load_queries(after(now), 0);
        commit();
      }
      compute_dq(now, 0, keys_nonfinite);
    }
  }
  // ---- finish: dK and dV leave through the shared memory of K and V ----
  if constexpr (kPair.fp32_out) {
    if (values)
      store_fp32_gradient<Spec::kHeaddimV, kColumnsV>(p.dv, p.dv_strides, sum, kPair.dropout ? pairs_of(p).dropout_scale : 1.f, member * kColumnsV);
    else
      store_fp32_gradient<Spec::kHeaddim, kColumns>(p.dk, p.dk_strides, sum, p.softmax_scale, member * kColumns);
    return;
  }
  __syncthreads();
  if (values)
    store_gradient<kWidthV, kColumnsV>(shared + kTile.v_offset(), sum, kPair.dropout ? pairs_of(p).dropout_scale : 1.f, member * kColumnsV);
  else
    store_gradient<kWidth, kColumns>(shared, sum, p.softmax_scale, member * kColumns);
  __syncthreads();
  const KLoader k_loader(thread);
  const VLoader v_loader(thread);
  const int rows = p.seqlen_k - first_key;
  k_loader.template store<kBlockN>(shared, const_cast<Bits*>(at(p.dk, p.dk_strides, batch, head_k, first_key)), p.dk_strides.row, rows);
  v_loader.template store<kBlockN>(shared + kTile.v_offset(), const_cast<Bits*>(at(p.dv, p.dv_strides, batch, head_k, first_key)), p.dv_strides.row,
                                   rows);
}

template <class Spec>
__device__ __forceinline__ void backward(const AttentionParams& p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const auto run = [&](auto& params) { Backward<Spec>(params, ptx::shared_address(shared_memory), static_cast<int>(blockIdx.x)).run(); };
  if constexpr (kPairOf<Spec>.packed) {
    PairParams own = pairs_of(p);
    run(own);
  } else {
    run(p);
  }
}

}  // namespace fattn::v2
