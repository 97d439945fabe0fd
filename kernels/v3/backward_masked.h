// The blocks of queries that a mask of pairs leaves a tile of v3's backward pass: those before the first one that shows a pair of any of its heads,
// and behind the last one, are not computed, not even loaded. A block of which the mask hides everything between two others is computed.
#pragma once

#include "kernels/pair.h"
#include "kernels/ptx/dependent_launch.h"
#include "kernels/ptx/warp.h"
#include "kernels/v3/backward_load.h"
#include "kernels/v3/backward_schedule.h"
#include "kernels/v3/backward_shape.h"
#include "kernels/v3/mask_words.h"

namespace fattn::v3 {

// The tile as its mask alone has it, at least one block, without those. By a warp, behind the kernel that makes words of the mask.
template <class Spec>
__device__ __forceinline__ KeyTile narrowed(const BackwardCall& p, KeyTile tile, int lane) {
  using Shape = BackwardShape<Spec>;
  using Mask = typename Spec::Mask;
  const MaskWordsPlace<false> place{pairs_of(p.call)};
  const int begin = tile.first_row / kV3BackwardRows, end = begin + tile.blocks, heads = place.of_heads() ? p.call.group : 1;
  const int step = place.of_rows() ? 1 : 0;
  int seen_from[Shape::kKeyGroups];  // of each 64 keys, the first block that the other mask lets see them: what is before was not written
#pragma unroll
  for (int group = 0; group < Shape::kKeyGroups; ++group) {
    const int key = tile.key + 64 * group;
    seen_from[group] = key < p.call.seqlen_k ? Mask::first_row(p.call, Keys<false>{}, key) / kV3BackwardRows : end;
  }
  int least = end, most = begin;
#pragma unroll 1
  for (int first = begin; first < end; first += 32) {
    const int block = min(first + lane, end - 1);
    unsigned shown = 0;
#pragma unroll 1
    for (int head = 0; head < heads; ++head)
#pragma unroll
      for (int group = 0; group < Shape::kKeyGroups; ++group)
        if (block >= seen_from[group]) shown |= *(place.shows(tile.batch, tile.head_k * p.call.group + head, tile.key + 64 * group) - step * block);
    const unsigned of = ptx::ballot(shown != 0);
    if (of == 0) continue;
    least = min(least, first + __ffs(static_cast<int>(of)) - 1);
    most = min(first + 32 - __clz(static_cast<int>(of)), end);
  }
  least = min(least, end - 1);
  tile.first_row = least * kV3BackwardRows;
  tile.blocks = max(most - least, 1);
  return tile;
}

// The barriers, the tile, and its keys and values on their way as soon as may be. By the first warp.
template <class Spec>
__device__ __forceinline__ void begin_masked_tile(const BackwardCall& p, unsigned shared, BackwardBarriers<Spec> barriers, TilePlace place,
                                                  int lane) {
  using Shape = BackwardShape<Spec>;
  static_assert(!Shape::kLengths);
  const KeyTile whole = key_tile_of<typename Spec::Mask, Shape::kBlockN, false>(p, static_cast<int>(blockIdx.x));
  if (lane == 0) {
    barriers.init();
    place.write<false, false>(whole);
    const BackwardLoader<Spec> loader(p, shared, barriers);
    loader.load_keys(place);
    loader.load_values(place);
  }
  ptx::wait_for_kernel_before();
  const KeyTile tile = narrowed<Spec>(p, whole, lane);
  if (lane == 0) place.write<false, false>(tile);
}

}  // namespace fattn::v3
