// Backward in fp32, before the main kernel where BackwardF32Tile::query_stages is 2: q and dout are split into two fp16, once for all tiles of keys.
// A CTA takes a block of q or of dout; BackwardF32Parts has the layout. Spec: kHeaddim, kHeaddimV, kAligned, kTile, as in backward_f32.h.
#pragma once

#include "kernels/tile/split_rows.h"
#include "kernels/v2/split_rows_tile.h"
#include "shared/attention_params.h"
#include "shared/backward_f32_layout.h"

namespace fattn::v2 {

template <class Spec>
__device__ __forceinline__ void backward_f32_split(const AttentionParams& p, const BackwardF32Parts& parts) {
  constexpr BackwardF32Tile kTile = Spec::kTile;
  // The grid: blocks of q, then as many of dout.
  const int of_each = p.batch * p.nheads * parts.blocks, index = static_cast<int>(blockIdx.x);
  const bool is_dout = index >= of_each;
  const int number = is_dout ? index - of_each : index, nth = number / parts.blocks, first = (number - nth * parts.blocks) * kTile.block_m;
  const int batch = nth / p.nheads, head = nth - batch * p.nheads;
  const TensorStrides& strides = is_dout ? p.dout_strides : p.q_strides;
  const float* const source = static_cast<const float*>(is_dout ? p.dout : p.q) + batch * strides.batch + head * strides.head + first * strides.row;
  const long long at = number;
  if (is_dout)
    tile::split_rows<SplitRows<kTile.block_m, kTile.width_v>, kBackwardF32SplitThreads, Spec::kHeaddimV, Spec::kAligned>(
        source, strides.row, p.seqlen_q - first, parts.dout + at * kTile.dout_bytes(), parts.inverses + 2 * at + 1);
  else
    tile::split_rows<SplitRows<kTile.block_m, kTile.width>, kBackwardF32SplitThreads, Spec::kHeaddim, Spec::kAligned>(
        source, strides.row, p.seqlen_q - first, parts.q + at * kTile.q_bytes(), parts.inverses + 2 * at);
}

}  // namespace fattn::v2
