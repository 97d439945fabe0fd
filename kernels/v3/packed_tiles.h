// Before a v3 forward pass over packed sequences: the list of their tiles, group by group of sequences, those with most blocks of keys first. The
// host does not know the lengths; with the list no CTA of the pass has a tile without rows, and whoever is free takes the next. With
// kDocuments the blocks are those that a tile's documents leave it, which a kernel before has found (v3/documents.h).
//
// One CTA. The order of tiles with as many blocks is any, and no result depends on it.
#pragma once

#include "device_abi/v3_packed_tiles.h"
#include "kernels/ptx/dependent_launch.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/sequence.h"
#include "kernels/v3/bucket_sums.h"
#include "kernels/v3/documents.h"
#include "kernels/v3/mask.h"

namespace fattn::v3 {

// kLengths: keys that a sequence does not use are as those of another sequence to the pass.
template <class Mask, int kBlockM, int kBlockN, bool kLengths, bool kDocuments>
struct PackedTileList {
  static constexpr int kBuckets = kV3PackThreads;  // by group and number of blocks

  // Calls visit(tile, its bucket, the longest of a group first) for each tile: a warp takes a sequence.
  template <class Visit>
  static __device__ __forceinline__ void for_each(const PairParams& p, Visit visit) {
    const auto [warp, lane] = ptx::thread_place();
    const int in_group = kBuckets / p.tile_groups, most = (p.seqlen_k + kBlockN - 1) / kBlockN + 1;
    for (int n = warp; n < p.batch; n += kV3PackThreads / 32) {
      const Sequence at = given_sequence<kLengths>(p, n);
      const Keys<false, true> keys{at.k.count, at.q.count};
      const int group = min(static_cast<int>(at.k.begin * static_cast<long long>(p.tile_groups) / p.total_k), p.tile_groups - 1);
      for (int row = lane * kBlockM; row < at.q.count; row += 32 * kBlockM) {
        const int end = Mask::visible_end(p, keys, row + kBlockM - 1), begin = visible_begin<Mask>(p, keys, row);
        const int first = begin / kBlockN, last = (end + kBlockN - 1) / kBlockN;
        int blocks = last - first;
        if constexpr (kDocuments) {
          const V3DocumentBlocks* const found = PackedDocumentPlace<kBlockM, kBlockN>::blocks(p, at.q.begin, n);
          blocks = min(blocks, blocks_of_documents<kBlockM>(found + row / kV3DocumentRows, first, last));
        }
        blocks = max(0, blocks);  // below `most`
        const int length = most <= in_group ? blocks : static_cast<int>(static_cast<long long>(blocks) * in_group / most);
        visit(V3PackedTile{row, n, at.q.begin, at.q.count, at.k.begin, at.k.count, {}}, (group + 1) * in_group - 1 - length);
      }
    }
  }

  static __device__ __forceinline__ void run(const PairParams& p) {
    ptx::let_kernel_after_come_up();
    if constexpr (kDocuments) ptx::wait_for_kernel_before();
    __shared__ int first[kBuckets];  // counts; then where each bucket begins
    const int thread = static_cast<int>(threadIdx.x);
    first[thread] = 0;
    __syncthreads();
    for_each(p, [&](const V3PackedTile&, int bucket) { atomicAdd(&first[bucket], 1); });
    __syncthreads();
    const int count = first[thread];
    const int until = sum_up_to<kBuckets>(first);
    // There may be more only where offsets are out of range, and what is in range has rows in common.
    const int most = static_cast<int>(most_packed_tiles(p.total_q, p.batch, kBlockM));
    if (thread == kBuckets - 1) {
      static_cast<V3PackedTiles*>(p.tiles)->count = min(until, most);
      static_cast<V3PackedTiles*>(p.tiles)->taken = 0;
    }
    __syncthreads();
    first[thread] = until - count;
    __syncthreads();
    V3PackedTile* const tiles = reinterpret_cast<V3PackedTile*>(static_cast<V3PackedTiles*>(p.tiles) + 1);
    for_each(p, [&](const V3PackedTile& tile, int bucket) {
      const int place = atomicAdd(&first[bucket], 1);
      if (place < most) tiles[place] = tile;
    });
  }
};

template <class Mask, int kBlockM, int kBlockN, bool kLengths, bool kDocuments = false>
__device__ __forceinline__ void packed_tiles(const PairParams& p) {
  PackedTileList<Mask, kBlockM, kBlockN, kLengths, kDocuments>::run(p);
}

}  // namespace fattn::v3
