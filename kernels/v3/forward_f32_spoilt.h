// Values that are not finite, in v3's forward pass in fp32: the products take them for 0, and they are added to the rows of o that see them. The
// kernel that splits notes where they are, by column. So a tile of queries asks each block once, however many there are.
#pragma once

#include "device_abi/attention_params.h"
#include "device_abi/v3_f32_parts.h"
#include "kernels/constants.h"
#include "kernels/ptx/reduce_warp.h"
#include "kernels/ptx/warp.h"
#include "kernels/v3/mask.h"

namespace fattn::v3 {

// Of a block of v, its first row at `source`, `rows` rows or more than a block has; by all threads of a CTA. A thread takes a column and a sign.
template <int kHeaddimV>
__device__ __forceinline__ void note_spoilt(const float* source, long long row_stride, int rows, V3F32Spoilt& spoilt) {
  static_assert(kV3F32SplitThreads == 256 && kHeaddimV <= 128);
  const int sign = static_cast<int>(threadIdx.x) / 128, column = static_cast<int>(threadIdx.x) % 128;
  int first = kV3F32Block;
  if (column < kHeaddimV) {
#pragma unroll 8
    for (int key = min(rows, kV3F32Block) - 1; key >= 0; --key) {
      const float x = source[key * row_stride + column];
      if (x != x || x == (sign == 0 ? kInfinity : -kInfinity)) first = key;
    }
  }
  spoilt.first[sign][column] = static_cast<unsigned char>(first);
  const unsigned columns = ptx::ballot(first < kV3F32Block);
  if (column % 32 == 0) spoilt.columns[sign][column / 32] = columns;
}

// Adds them to what the warp has written of o: its 16 rows from `row` on, the first of them at `o`. `values` and `spoilt` are of the head's blocks,
// of which some row sees `blocks` at most. All lanes of a warp together; a lane takes a column.
template <class Spec>
__device__ __forceinline__ void add_spoilt_columns(const AttentionParams& p, float* o, int row, int blocks, const V3F32Factor* values,
                                                   const V3F32Spoilt* spoilt, int lane) {
  using Mask = typename Spec::Mask;
  bool odd = false;
#pragma unroll 1
  for (int block = lane; block < blocks; block += 32) odd = odd || values[block].odd != 0;
  if (ptx::ballot(odd) == 0) [[likely]]
    return;
  const auto end_of = [&](int of) { return Mask::visible_end(p, Keys<false>{}, of); };
  // Every row sees the whole of these blocks.
  const int whole = Mask::kUneven ? min(blocks, max(0, end_of(row)) / kV3F32Block) : blocks;
  ptx::warp_sync();  // o is written, by other lanes
#pragma unroll 1
  for (int word = 0; word < (Spec::kHeaddimV + 31) / 32; ++word) {
    const int column = 32 * word + lane;
    unsigned plus = 0, minus = 0;
#pragma unroll 1
    for (int block = lane; block < whole; block += 32) {
      if (values[block].odd == 0) continue;
      plus |= spoilt[block].columns[0][word];
      minus |= spoilt[block].columns[1][word];
    }
    // Rows that see this many keys have an Inf of the sign, or NaN, in the column.
    constexpr int kNever = 0x7fffffff;
    int from_plus = (ptx::warp_or(plus) >> lane & 1) != 0 ? 0 : kNever, from_minus = (ptx::warp_or(minus) >> lane & 1) != 0 ? 0 : kNever;
#pragma unroll 1
    for (int block = whole; block < blocks; ++block) {
      if (values[block].odd == 0) continue;
      const int plus_at = spoilt[block].first[0][column], minus_at = spoilt[block].first[1][column];
      if (plus_at < kV3F32Block) from_plus = min(from_plus, block * kV3F32Block + plus_at);
      if (minus_at < kV3F32Block) from_minus = min(from_minus, block * kV3F32Block + minus_at);
    }
    if (min(from_plus, from_minus) == kNever) continue;  // so of what the tensor does not have
    float* at = o + column;
#pragma unroll 8
    for (int i = 0; i < 16; ++i) {
      const int end = row + i < p.seqlen_q ? end_of(row + i) : 0;
      const bool sees_plus = from_plus < end, sees_minus = from_minus < end;
      if (sees_plus || sees_minus) *at += sees_plus && sees_minus ? kNan : sees_plus ? kInfinity : -kInfinity;
      at += p.o_strides.row;
    }
  }
}

}  // namespace fattn::v3
