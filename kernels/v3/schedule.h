// Which tiles of queries a CTA computes, in which order, and which blocks of keys a tile meets. All roles of a CTA ask here, for tiles of packed
// sequences v3/tiles_of_cta.h.
#pragma once

#include "device_abi/attention_params.h"
#include "device_abi/tensor_map.h"
#include "device_abi/v3_forward_work.h"
#include "device_abi/v3_packed_tiles.h"
#include "kernels/pair.h"
#include "kernels/v3/documents.h"
#include "kernels/v3/mask.h"
#include "kernels/v3/masked_keys.h"

namespace fattn::v3 {

// What the order of the tiles follows from.
struct TileCall {
  const AttentionParams& call;  // heads_per_section as dense_place_of() and packed_tile() take it
  const V3ForwardWork& work;
};
// The kernel's parameters.
struct ForwardCall : TileCall {
  const TensorMap &q, &k, &v, &o;  // boxes of a tile of queries, of a block of keys (twice), of 64 rows of o
};

// The number of the CTA's tile `nth`, -1 after the last. In turns: to and fro under an uneven mask, where tiles become ever shorter, so that whoever
// had the longest of one turn gets the shortest of the next.
template <class Spec>
__device__ __forceinline__ int tile_in_turn(const TileCall& p, int nth) {
  const int cta = static_cast<int>(blockIdx.x), ctas = static_cast<int>(gridDim.x);
  int number;
  if (p.work.tiles_per_cta > 0) {
    number = nth < p.work.tiles_per_cta ? cta * p.work.tiles_per_cta + nth : p.work.tiles;
  } else {
    number = nth * ctas + (Spec::Mask::kUneven && nth % 2 == 1 ? ctas - 1 - cta : cta);
  }
  return number < p.work.tiles ? number : -1;
}

__device__ __forceinline__ int divide(int x, const Divisor& by) {
  return static_cast<int>(__umulhi(2 * static_cast<unsigned>(x), by.factor) >> by.shift);
}

// The batch entry is one of the tensors; where packed sequences have none, it is 0 and their rows begin further on. entry() counts those too: what
// slopes and random numbers go by.
struct Place {
  int row;  // first query of the tile
  int head, head_k, batch;
  __device__ __forceinline__ int first_query() const { return 0; }
  __device__ __forceinline__ int first_key() const { return 0; }
  __device__ __forceinline__ int keys_behind(const AttentionParams& p) const { return p.seqlen_k; }
  __device__ __forceinline__ int entry() const { return batch; }
};
struct PackedPlace {
  int row;
  int head, head_k;
  int q_begin, k_begin;
  Keys<false, true> keys;
  int sequence;
  static constexpr int batch = 0;
  __device__ __forceinline__ int first_query() const { return q_begin; }
  __device__ __forceinline__ int first_key() const { return k_begin; }
  // Keys from the sequence's first to the end of memory.
  __device__ __forceinline__ int keys_behind(const AttentionParams& p) const { return static_cast<int>(pairs_of(p).total_k - k_begin); }
  __device__ __forceinline__ int entry() const { return sequence; }
};

// Whether tiles go by the blocks that a mask of pairs shows.
template <class Spec>
inline constexpr bool kMaskRanges = kPairOf<Spec>.mask;

// The keys of a tile; of documents as warpgroup `group` sees them.
template <class Spec, bool kDocuments = kPairOf<Spec>.documents, bool kPacked = kPairOf<Spec>.packed, bool kMask = kMaskRanges<Spec>>
struct KeysOf {
  using Type = Keys<kPairOf<Spec>.lengths, kPacked>;
  using Kept = Type;  // by a consumer, all through a tile
};
template <class Spec>
struct KeysOf<Spec, true, false, false> {
  using Type = DocumentKeys<Keys<kPairOf<Spec>.lengths>, 64 * Spec::kGroups, Spec::kBlockN>;
  using Kept = Type;
};
template <class Spec>
struct KeysOf<Spec, true, true, false> {
  using Type = PackedDocumentKeys<64 * Spec::kGroups, Spec::kBlockN>;
  using Kept = Type;
};
template <class Spec>
struct KeysOf<Spec, false, false, true> {
  using Type = MaskedKeys<Keys<kPairOf<Spec>.lengths>, 64 * Spec::kGroups, Spec::kBlockN>;
  using Kept = Keys<kPairOf<Spec>.lengths>;
};
// Whether a kernel before the pass has found which blocks a tile sees.
template <class Keys>
inline constexpr bool kOfBlocks = requires(Keys keys) {
  keys.end_of(0);
};
template <class Spec>
__device__ __forceinline__ auto keys_of(const AttentionParams& p, const Place& place, int group = 0) {
  if constexpr (kPairOf<Spec>.documents)
    return KeysOf<Spec>::Type::of(p, place.batch, place.row, group);
  else if constexpr (kMaskRanges<Spec>)
    return KeysOf<Spec>::Type::of(p, place.batch, place.head, place.row);
  else
    return Keys<kPairOf<Spec>.lengths>::of(p, place.batch);
}
template <class Spec>
__device__ __forceinline__ auto keys_of(const AttentionParams& p, const PackedPlace& place, int group = 0) {
  if constexpr (kPairOf<Spec>.documents)
    return KeysOf<Spec>::Type::of(p, place.keys, place.q_begin, place.k_begin, place.sequence, place.row, group);
  else
    return place.keys;
}

// The same, asked for by a whole warp.
template <class Spec, class Place>
__device__ __forceinline__ auto keys_of_warp(const AttentionParams& p, const Place& place, int group, int lane) {
  if constexpr (kMaskRanges<Spec>)
    return KeysOf<Spec>::Type::of_warp(p, place.batch, place.head, place.row, lane);
  else
    return keys_of<Spec>(p, place, group);
}

// A tile of packed sequences as the list has it (V3PackedTile), and its head.
struct PackedTileOfHead {
  uint4 first;   // row (-1: there is no such tile), batch, q_begin, seqlen_q
  uint2 second;  // k_begin, seqlen_k
  int head;
};
// The list's tiles are taken section by section of heads, whose keys and values stay in L2, and in a section the heads of a tile are neighbours.
__device__ __forceinline__ PackedTileOfHead packed_tile(const ForwardCall& p, int number) {
  const int tiles_of_head = static_cast<const V3PackedTiles*>(pairs_of(p.call).tiles)->count, in_section = p.call.heads_per_section;
  if (number >= tiles_of_head * p.call.nheads) return {{~0u, 0, 0, 0}, {0, 0}, 0};
  const int section = number / (tiles_of_head * in_section), first_head = section * in_section, rest = number - first_head * tiles_of_head;
  const int heads = min(in_section, p.call.nheads - first_head), nth = rest / heads, head = first_head + rest - nth * heads;
  const char* const tiles = static_cast<const char*>(pairs_of(p.call).tiles) + sizeof(V3PackedTiles);
  const uint4* const at = reinterpret_cast<const uint4*>(tiles + nth * static_cast<long long>(sizeof(V3PackedTile)));
  return {at[0], *reinterpret_cast<const uint2*>(at + 1), head};
}

// Tiles of one section of (batch, head) pairs run side by side, so that their keys and values stay in L2; those of the last queries (under a causal
// mask the longest) first.
template <int kBlockM>
__device__ __forceinline__ Place dense_place_of(const TileCall& p, int number) {
  const AttentionParams& call = p.call;
  const V3ForwardWork& work = p.work;
  const int section = divide(number, work.by_section);
  const int in_section = number - section * (call.heads_per_section * work.row_tiles);
  const bool last = section == work.sections - 1;
  const int turn = divide(in_section, last ? work.by_heads_of_last : work.by_heads);
  const int nth = section * call.heads_per_section + in_section - turn * (last ? work.heads_of_last : call.heads_per_section);
  const int batch = divide(nth, work.by_nheads), head = nth - batch * call.nheads;
  return {(work.row_tiles - 1 - turn) * kBlockM, head, divide(head, work.by_group), batch};
}

// Blocks with the keys below `end`; at least one.
template <int kBlockN>
__device__ __forceinline__ int blocks_until(int end) {
  return max(1, (end + kBlockN - 1) / kBlockN);
}

// Blocks of keys [begin, end) that some of the rows [row, row + count) see; at least one, which may be hidden whole. Of
// documents and masks of pairs all rows of a tile begin with the same.
template <class Mask, int kBlockN, class Keys>
__device__ __forceinline__ int block_begin(const AttentionParams& p, Keys keys, int row) {
  if constexpr (kOfBlocks<Keys>) {
    const int begin = max(visible_begin<Mask>(p, keys, keys.tile_of(row)) / kBlockN, keys.begin);
    return min(begin, blocks_until<kBlockN>(Mask::visible_end(p, keys, keys.tile_of(row) + keys.kTileRows - 1)) - 1);
  }
  return visible_begin<Mask>(p, keys, row) / kBlockN;
}
template <class Mask, int kBlockN, class Keys>
__device__ __forceinline__ int block_end(const AttentionParams& p, Keys keys, int row, int count) {
  const int end = blocks_until<kBlockN>(Mask::visible_end(p, keys, row + count - 1));
  if constexpr (kOfBlocks<Keys>) return max(block_begin<Mask, kBlockN>(p, keys, row) + 1, min(end, keys.end_of(count)));
  return end;
}

}  // namespace fattn::v3
