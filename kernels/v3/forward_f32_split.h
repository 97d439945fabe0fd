// Before v3's forward pass in fp32: k and v are split into two fp16, once for all tiles of queries. A CTA takes a block of 64 keys of k or of v;
// device_abi/v3_f32_parts.h has the layout.
#pragma once

#include "device_abi/attention_params.h"
#include "device_abi/v3_f32_parts.h"
#include "kernels/ptx/dependent_launch.h"
#include "kernels/tile/split_rows.h"
#include "kernels/v3/forward_f32_spoilt.h"
#include "kernels/v3/operand_tile.h"

namespace fattn::v3 {

// A block as tile::split_rows() takes it.
template <int kHeaddim>
struct SplitBlock : OperandTile<kV3F32Block, kHeaddim> {
  using Tile = OperandTile<kV3F32Block, kHeaddim>;
  static constexpr int kUnits = 8 * Tile::kColumns;
  static_assert(2 * Tile::kBytes == v3_f32_block_bytes(kHeaddim));
  static __device__ __forceinline__ unsigned offset(int row, int unit) {
    return static_cast<unsigned>(unit / 8 * Tile::kColumnBytes + row * 128 + ((unit % 8) ^ (row % 8)) * 16);
  }
};

// The grid: blocks of k, then as many of v.
template <int kHeaddim, int kHeaddimV, bool kAligned>
__device__ __forceinline__ void split_keys_and_values(const AttentionParams& p, const V3F32Parts& parts) {
  ptx::let_kernel_after_come_up();
  const int of_each = p.batch * p.nheads_k * parts.blocks, index = static_cast<int>(blockIdx.x);
  const bool is_v = index >= of_each;
  const int number = is_v ? index - of_each : index, nth = number / parts.blocks, first = (number - nth * parts.blocks) * kV3F32Block;
  const int batch = nth / p.nheads_k, head = nth - batch * p.nheads_k;
  const TensorStrides& strides = is_v ? p.v_strides : p.k_strides;
  const float* const source = static_cast<const float*>(is_v ? p.v : p.k) + batch * strides.batch + head * strides.head + first * strides.row;
  const long long at = number;
  V3F32Factor* const factor = (is_v ? parts.v_factors : parts.k_factors) + at;
  unsigned odd;
  if (is_v)
    odd = tile::split_rows<SplitBlock<kHeaddimV>, kV3F32SplitThreads, kHeaddimV, kAligned, tile::NonfiniteCleaned, true>(
        source, strides.row, p.seqlen_k - first, parts.v + at * v3_f32_block_bytes(kHeaddimV), &factor->inverse);
  else
    odd = tile::split_rows<SplitBlock<kHeaddim>, kV3F32SplitThreads, kHeaddim, kAligned, tile::NothingCleaned, true>(
        source, strides.row, p.seqlen_k - first, parts.k + at * v3_f32_block_bytes(kHeaddim), &factor->inverse);
  if (threadIdx.x == 0) factor->odd = odd;
  if (is_v && odd != 0) [[unlikely]]
    note_spoilt<kHeaddimV>(source, strides.row, p.seqlen_k - first, parts.v_spoilt[at]);
}

}  // namespace fattn::v3
