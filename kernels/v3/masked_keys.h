// The blocks of keys that a mask of pairs leaves a tile of v3's forward pass: those before the first one with a pair that it shows, and behind the
// last one, are not computed, not even loaded: what a triangle, padding or a window that come as a mask consist of. A block of which the mask hides
// everything between two others is computed.
#pragma once

#include "device_abi/attention_params.h"
#include "kernels/pair.h"
#include "kernels/ptx/warp.h"
#include "kernels/v3/mask_words.h"

namespace fattn::v3 {

// The keys of a tile (v3/mask.h), and what the kernel before found out (v3/mask_words.h): read before the tile begins.
template <class Keys, int kBlockM, int kBlockN>
struct MaskedKeys : Keys {
  static constexpr int kTileRows = kBlockM;
  int begin, end;  // blocks of keys that the tile sees
  __device__ __forceinline__ int end_of(int) const { return end; }

  // `row`: the tile's first.
  static __device__ __forceinline__ MaskedKeys of(const AttentionParams& p, int batch, int head, int row) {
    unsigned shown = 0;
    Ranges ranges(p, batch, head, row);
#pragma unroll 1
    for (; ranges.left > 0; --ranges.left, --ranges.at) shown = __vmaxu2(shown, *ranges.at);
    return {Keys::of(p, batch), begin_of(shown), end_of_range(shown)};
  }
  // The same by a warp, which waits for memory once.
  static __device__ __forceinline__ MaskedKeys of_warp(const AttentionParams& p, int batch, int head, int row, int lane) {
    unsigned shown = 0;
    const Ranges ranges(p, batch, head, row);
#pragma unroll 1
    for (int i = lane; i < ranges.left; i += 32) shown = __vmaxu2(shown, *(ranges.at - i));
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) shown = __vmaxu2(shown, ptx::shfl_xor(shown, lanes));
    return {Keys::of(p, batch), begin_of(shown), end_of_range(shown)};
  }
  // Of the tile that has the row.
  static __device__ __forceinline__ int tile_of(int row) { return row / kBlockM * kBlockM; }

 private:
  static constexpr int kSides = kBlockN / kV3MaskSide;
  static_assert(kBlockN % kV3MaskSide == 0);
  static __device__ __forceinline__ int begin_of(unsigned range) { return v3_mask_range_begin(range) / kSides; }
  static __device__ __forceinline__ int end_of_range(unsigned range) { return (v3_mask_range_end(range) + kSides - 1) / kSides; }
  // Those of the tile's blocks of queries: they are neighbours.
  struct Ranges {
    const unsigned* at;
    int left;
    __device__ __forceinline__ Ranges(const AttentionParams& p, int batch, int head, int row) {
      const MaskWordsPlace<true> place{pairs_of(p)};
      at = place.range(place.range(batch, head, row, 0));
      left = (place.of_rows() ? min(kBlockM / kV3MaskSide, place.row_blocks() - row / kV3MaskSide) : 1) * v3_mask_ctas(p.seqlen_k, true);
    }
  };
};

}  // namespace fattn::v3
