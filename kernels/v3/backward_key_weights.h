// A block of a warpgroup that computes dk and dv (v3/backward_keys.h): P^T = exp2(S^T scale - lse), dS^T = P^T (dP^T - row_sum).
#pragma once

#include "kernels/v3/backward_keys.h"

namespace fattn::v3 {

// P from S, but for what the mask hides.
template <class Spec>
template <bool kCareful>
__device__ __forceinline__ void KeyGradients<Spec>::take_exponentials() {
  if constexpr (Shape::kBias != 0) {
    bias.template exponentials<kCareful>(s, lse_place(), scale, p, tile, head(step), row, key());
  } else if constexpr (!Shape::kAlibi) {
    exponentials(s, lse, scale);
  } else if constexpr (Mask::kBegins) {  // no registers for both ways
    take_each_exponential();
  } else if (const AlibiLine of = line(); Mask::kCausal || !of.crosses) {
    exponentials_on_line(s, lse_place(), scale, of);
  } else {
    take_each_exponential();
  }
}

// The same with ALiBi, pair by pair, lse where it is.
template <class Spec>
__device__ __forceinline__ void KeyGradients<Spec>::take_each_exponential() {
  const float of = slope(), distance = static_cast<float>(own_distance(p.call, keys(), key(), row));
#pragma unroll
  for (int i = 0; i < 32; i += 4) exponentials_of(s, i, lse_place(), scale, of, distance);
}

// P from capped scores, and what dS takes from both.
template <class Spec>
__device__ __forceinline__ void KeyGradients<Spec>::take_capped() {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float t[4] = {s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3]};
    if constexpr (Shape::kAlibi)
      exponentials_of(s, 4 * i, lse_place(), scale, slope(), static_cast<float>(own_distance(p.call, keys(), key(), row)));
    else
      exponentials_of(s, 4 * i, lse_place(), scale);
    keep_slopes<Element>(gradients, i, t, s);
  }
}

// P from S, which is there; on return dP is there too, and dV under way. kCareful: the tile may meet Inf or NaN (v3/backward_watch.h).
template <class Spec>
template <bool kCareful>
__device__ __forceinline__ void KeyGradients<Spec>::weigh() {
  if constexpr (Spec::Score::kCapped) {
    ptx::wgmma_wait<0>();  // as below, but before the scores are gone
    ptx::pin(gradients);
    Spec::Score::apply(s, p.call);
    take_capped();
    hide_in(s);
    if (kCareful || hides_some()) hide_slopes(gradients, s);
    pack<Element>(weights, s);
  } else {
    if constexpr (Shape::kBias != 0) end_dk();  // before: a bias takes those registers
    take_exponentials<kCareful>();
    hide_in(s);
    if constexpr (Shape::kBias == 0) end_dk();
    if constexpr (Shape::kDropout) {
      pack<Element>(gradients, s);
      kept = take_kept();
      drop(weights, gradients, kept);
    } else {
      pack_and_keep_rest<Element, (kWatches || !Shape::kAlibi) && Shape::kBias == 0>(weights, gradients, s);
    }
  }
  ptx::pin(weights);
  ptx::pin(gradients);
  if constexpr (kCareful) take_nonfinite_out();
  ptx::mbarrier_wait(barriers.dout_full(queries.stage()), queries.parity());
  begin_dp(dp, shared + Shape::kOffsetRowSum + slot() * Shape::kRowBytes);
  ptx::pin(dp);
  ptx::wgmma_fence();
  issue_dp();
  issue_dv();
  ptx::wgmma_wait<1>();
  ptx::pin(dp);
}

// dS from dP and P, for which dV has to give its operand back.
template <class Spec>
template <bool kCareful>
__device__ __forceinline__ void KeyGradients<Spec>::differentiate() {
  ptx::wgmma_wait<0>();
  ptx::pin(weights);
  if constexpr (Shape::kDropout || Spec::Score::kCapped) hold(weights, step == ~0u, shared);
  if constexpr (Spec::Score::kCapped)
    multiply_slopes<Element>(gradients, dp);
  else if constexpr (Shape::kDropout)
    multiply_kept<Element>(gradients, kept, dp, shared + Shape::kOffsetRowSum + slot() * Shape::kRowBytes);
  else
    multiply<Element>(gradients, weights, dp);
  ptx::pin(gradients);
  if constexpr (kCareful) {
    ptx::warp_sync();  // else ptxas reads lse before it has registers for it
    select_seen(gradients, weights, lse_place());
    ptx::pin(gradients);
  }
}

}  // namespace fattn::v3
