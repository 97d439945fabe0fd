// Backward in fp32, before the main kernel where BackwardF32Tile::query_stages is 2: q and dout are split into two fp16, once for all tiles of keys.
// A CTA takes a block of q or of dout; BackwardF32Parts has the layout. Spec: kHeaddim, kHeaddimV, kAligned, kTile, as in backward_f32.h.
#pragma once

#include "device_abi/attention_params.h"
#include "device_abi/backward_f32_layout.h"
#include "kernels/pair.h"
#include "kernels/sequence.h"
#include "kernels/tile/split_rows.h"
#include "kernels/v2/split_rows_tile.h"

namespace fattn::v2 {

template <class Spec>
__device__ __forceinline__ void backward_f32_split(const AttentionParams& call, const BackwardF32Parts& parts) {
  constexpr BackwardF32Tile kTile = Spec::kTile;
  constexpr PairFeatures kPair = kPairOf<Spec>;
  // The grid: blocks of q, then as many of dout.
  const auto blocks = [&] { return kPairOf<Spec>.packed ? (call.seqlen_q + kTile.block_m - 1) / kTile.block_m : parts.blocks; };
  const int of_each = call.batch * call.nheads * blocks(), index = static_cast<int>(blockIdx.x);
  const bool is_dout = index >= of_each;
  const int nth_block = is_dout ? index - of_each : index, nth = nth_block / blocks(), first = (nth_block - nth * blocks()) * kTile.block_m;
  const int batch = nth / call.nheads, head = nth - batch * call.nheads;
  const auto& p = entry_params<kPair, float>(call, batch);
  if (kPair.packed && first >= p.seqlen_q) return;
  const TensorStrides& strides = is_dout ? p.dout_strides : p.q_strides;
  const float* const source = static_cast<const float*>(is_dout ? p.dout : p.q) + batch * strides.batch + head * strides.head + first * strides.row;
  long long at = nth_block;
  if constexpr (kPair.packed)
    at = static_cast<long long>(head) * parts.blocks + given_sequence<kPair.lengths>(pairs_of(call), batch).q.begin / kTile.block_m + batch +
         first / kTile.block_m;
  if (is_dout)
    tile::split_rows<SplitRows<kTile.block_m, kTile.width_v>, kBackwardF32SplitThreads, Spec::kHeaddimV, Spec::kAligned>(
        source, strides.row, p.seqlen_q - first, parts.dout + at * kTile.dout_bytes(), parts.inverses + 2 * at + 1);
  else
    tile::split_rows<SplitRows<kTile.block_m, kTile.width>, kBackwardF32SplitThreads, Spec::kHeaddim, Spec::kAligned, tile::NonfiniteCleaned>(
        source, strides.row, p.seqlen_q - first, parts.q + at * kTile.q_bytes(), parts.inverses + 2 * at);
}

}  // namespace fattn::v2
