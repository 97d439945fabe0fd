// Which tile of keys a CTA computes, and which blocks of queries it meets. All roles of a CTA ask here; and the kernels before and after.
#pragma once

#include "kernels/ptx/shared_memory.h"
#include "kernels/v3/mask.h"
#include "shared/attention_params.h"
#include "shared/tensor_map.h"
#include "shared/v3_backward_work.h"

namespace fattn::v3 {

// The kernel's parameters.
struct BackwardCall {
  const AttentionParams& call;
  const V3BackwardWork& work;
  const TensorMap &q, &k, &v, &dout, &dk, &dv;  // boxes of a block of queries (q, dout), of a tile of keys (k, v), of 64 rows (dk, dv)
};

struct KeyTile {
  int number, head_k, batch;
  int key;                // first
  int first_row, blocks;  // of queries, of each head that shares the keys: blocks of kV3BackwardRows from first_row on, which sees a key. At least
                          // one; keys that no row sees take the first, whose rows do not see them
  int keys;               // of the batch entry; a tile from there on computes nothing
};

// Tiles of one section of (batch, key head) pairs run side by side, so that their q, dout and dq stay in L2; those of the first keys (under a causal
// mask the longest) first.
template <class Mask, int kBlockN, bool kLengths>
__device__ __forceinline__ KeyTile key_tile_of(const BackwardCall& p, int index) {
  const AttentionParams& call = p.call;
  const int per_section = call.heads_per_section * p.work.key_tiles;
  const int section = index / per_section;
  const int in_section = index - section * per_section;
  const int first_head = section * call.heads_per_section;
  const int heads = min(call.heads_per_section, call.batch * call.nheads_k - first_head);
  const int number = in_section / heads;
  const int nth = first_head + in_section - number * heads;
  const int batch = nth / call.nheads_k;
  const auto keys = Keys<kLengths>::of(call, batch);
  const int first_block = Mask::first_row(call, keys, number * kBlockN) / kV3BackwardRows;
  int end_block = p.work.row_blocks;
  if constexpr (Mask::kBegins) {
    const int end = Mask::row_end(call, keys, min((number + 1) * kBlockN, keys.count(call)) - 1);
    end_block = max(first_block + 1, (end + kV3BackwardRows - 1) / kV3BackwardRows);
  }
  return {number, nth - batch * call.nheads_k, batch, number * kBlockN, first_block * kV3BackwardRows, end_block - first_block, keys.count(call)};
}

// How many tiles of lower keys meet a block of queries, counted over all heads. Under a mask that begins some lower ones do not; but tiles whose keys
// nobody sees meet the first block of a head.
template <class Mask, int kBlockN, class Keys>
__device__ __forceinline__ int tiles_before(const BackwardCall& p, Keys keys, int tile, int block) {
  if constexpr (Mask::kBegins) {
    const int of_head = block % p.work.row_blocks;
    return of_head == 0 ? tile : tile - Mask::visible_begin(p.call, keys, of_head * kV3BackwardRows) / kBlockN;
  }
  return tile;
}

// The tile in shared memory: written once, and read where it is needed, to keep registers free.
struct TilePlace {
  unsigned address;
  template <bool kLengths>
  __device__ __forceinline__ void write(const KeyTile& tile) const {
    const int of[7] = {tile.number, tile.head_k, tile.batch, tile.key, tile.first_row, tile.blocks, tile.keys};
#pragma unroll
    for (int i = 0; i < (kLengths ? 7 : 6); ++i) ptx::st_shared_4(address + static_cast<unsigned>(4 * i), static_cast<unsigned>(of[i]));
  }
  __device__ __forceinline__ int at(unsigned index) const { return static_cast<int>(ptx::ld_shared_4(address + 4 * index)); }
  __device__ __forceinline__ int number() const { return at(0); }
  __device__ __forceinline__ int head_k() const { return at(1); }
  __device__ __forceinline__ int batch() const { return at(2); }
  __device__ __forceinline__ int key() const { return at(3); }
  __device__ __forceinline__ int first_row() const { return at(4); }
  __device__ __forceinline__ int blocks() const { return at(5); }
  template <bool kLengths>
  __device__ __forceinline__ Keys<kLengths> keys() const {
    if constexpr (kLengths)
      return {at(6)};
    else
      return {};
  }
  // The first row behind the blocks, which end with the queries unless keys have a last row that sees them.
  template <class Mask>
  __device__ __forceinline__ int rows_end(const BackwardCall& p) const {
    if constexpr (Mask::kBegins) return first_row() + blocks() * kV3BackwardRows;
    return p.work.row_blocks * kV3BackwardRows;
  }
  // From the end of one head's blocks to the beginning of the next one's.
  template <class Mask>
  __device__ __forceinline__ int blocks_between(const BackwardCall& p) const {
    if constexpr (Mask::kBegins) return p.work.row_blocks - blocks();
    return first_row() / kV3BackwardRows;
  }
};

// The block of queries of a CTA of the kernels before and after. The last heads come first: the next kernel then finds the first ones in L2.
struct QueryBlock {
  int batch, head, row;  // first
};
__device__ __forceinline__ QueryBlock query_block(const AttentionParams& call, const V3BackwardWork& work) {
  const unsigned index = gridDim.x - 1 - blockIdx.x, blocks = static_cast<unsigned>(work.row_blocks);
  const unsigned nth = index / blocks, batch = nth / static_cast<unsigned>(call.nheads);
  return {static_cast<int>(batch), static_cast<int>(nth - batch * static_cast<unsigned>(call.nheads)),
          static_cast<int>(index - nth * blocks) * kV3BackwardRows};
}

// The same after a main kernel whose tiles come head beside head, lower keys and with them lower rows first: what it added to last is in L2.
__device__ __forceinline__ QueryBlock query_block_of_window(const AttentionParams& call, const V3BackwardWork& work) {
  const int index = static_cast<int>(gridDim.x - 1 - blockIdx.x), per_section = call.heads_per_section * call.group;
  const int section = index / (per_section * work.row_blocks), first_head = section * per_section;
  const int heads = min(per_section, call.batch * call.nheads - first_head), in_section = index - first_head * work.row_blocks;
  const int row = in_section / heads, nth = first_head + in_section - row * heads, batch = nth / call.nheads;
  return {batch, nth - batch * call.nheads, row * kV3BackwardRows};
}

// The first element of a query head's rows in lse_log2 and row_sum.
__device__ __forceinline__ long long first_workspace_row(const BackwardCall& p, int batch, int head) {
  return (static_cast<long long>(batch) * p.call.nheads + head) * p.work.row_blocks * kV3BackwardRows;
}

}  // namespace fattn::v3
