// Which tile of keys a CTA computes, and which blocks of queries it meets. All roles of a CTA ask here; and the kernels before and after.
#pragma once

#include "device_abi/attention_params.h"
#include "device_abi/tensor_map.h"
#include "device_abi/v3_backward_work.h"
#include "device_abi/v3_packed_tiles.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/sequence.h"
#include "kernels/v3/mask.h"

namespace fattn::v3 {

// The kernel's parameters.
struct BackwardCall {
  const AttentionParams& call;
  const V3BackwardWork& work;
  const TensorMap &q, &k, &v, &dout, &dk, &dv;  // boxes of a block of queries (q, dout), of a tile of keys (k, v), of 64 rows (dk, dv)
};

// Whether the kernels convert dq early (v3/backward_ring.h). Spec: kRing; false if it is left out.
template <class Spec>
consteval bool ring_of() {
  if constexpr (requires { Spec::kRing; })
    return Spec::kRing;
  else
    return false;
}

struct KeyTile {
  int number, head_k, batch;
  int key;                // first
  int first_row, blocks;  // of queries, of each head that shares the keys: blocks of kV3BackwardRows from first_row on, which sees a key. At least
                          // one; keys that no row sees take the first, whose rows do not see them
  int keys;               // of the batch entry; a tile from there on computes nothing
  // Of packed sequences, whose tiles are numbered from 0 in each (-1: there is none): queries of the sequence, its first row in the tensors of
  // queries and in those of keys, and the first of its blocks in a head's part of the workspace.
  int rows, q_begin, k_begin, place;
};

// Tiles of one section of (batch, key head) pairs run side by side, so that their q, dout and dq stay in L2; those of the first keys (under a causal
// mask the longest) first.
template <class Mask, int kBlockN, bool kLengths>
__device__ __forceinline__ KeyTile key_tile_of(const BackwardCall& p, int index) {
  const AttentionParams& call = p.call;
  // Nothing is loaded before this is known: unsigned divisions take less time, and heads one by one need one less.
  const auto divided = [](int a, int b) { return static_cast<int>(static_cast<unsigned>(a) / static_cast<unsigned>(b)); };
  const int per_section = call.heads_per_section * p.work.key_tiles;
  const int section = divided(index, per_section);
  const int in_section = index - section * per_section;
  const int first_head = section * call.heads_per_section;
  const int heads = min(call.heads_per_section, call.batch * call.nheads_k - first_head);
  const int number = call.heads_per_section == 1 ? in_section : divided(in_section, heads);
  const int nth = first_head + in_section - number * heads;
  const int batch = divided(nth, call.nheads_k);
  const auto keys = Keys<kLengths>::of(call, batch);
  const int first_block = Mask::first_row(call, keys, number * kBlockN) / kV3BackwardRows;
  int end_block = p.work.row_blocks;
  if constexpr (Mask::kBegins) {
    const int end = Mask::row_end(call, keys, min((number + 1) * kBlockN, keys.count(call)) - 1);
    end_block = max(first_block + 1, (end + kV3BackwardRows - 1) / kV3BackwardRows);
  }
  return {number, nth - batch * call.nheads_k, batch, number * kBlockN, first_block * kV3BackwardRows, end_block - first_block, keys.count(call)};
}

// A sequence's blocks of queries in a head's part of the workspace begin at the one in which its first row would be, plus one for each sequence
// before it, so that no block has rows of two.
__device__ __forceinline__ int packed_block_of(const Rows& q, int sequence) { return q.begin / kV3BackwardRows + sequence; }

// Of packed sequences, whose tiles are in a list: section by section of heads, and in a section the heads of a tile are neighbours.
struct ListedTile {
  V3PackedTile tile;
  int head_k;
};
__device__ __forceinline__ ListedTile listed_tile(const BackwardCall& p, int index) {
  const AttentionParams& call = p.call;
  const int tiles = p.work.key_tiles;
  const int section = index / (tiles * call.heads_per_section), first_head = section * call.heads_per_section, rest = index - first_head * tiles;
  const int heads = min(call.heads_per_section, call.nheads_k - first_head), nth = rest / heads;
  return {static_cast<const V3PackedTile*>(pairs_of(call).tiles)[nth], first_head + rest - nth * heads};
}
template <class Mask, int kBlockN>
__device__ __forceinline__ KeyTile packed_key_tile_of(const BackwardCall& p, const ListedTile& listed) {
  const AttentionParams& call = p.call;
  const V3PackedTile& at = listed.tile;
  if (at.row < 0) return {-1};
  const Keys<false, true> keys{at.seqlen_k, at.seqlen_q};
  const int first_block = Mask::first_row(call, keys, at.row) / kV3BackwardRows;
  int end_block = (at.seqlen_q + kV3BackwardRows - 1) / kV3BackwardRows;
  if constexpr (Mask::kBegins) {
    const int end = Mask::row_end(call, keys, min(at.row + kBlockN, at.seqlen_k) - 1);
    end_block = max(first_block + 1, (end + kV3BackwardRows - 1) / kV3BackwardRows);
  }
  return {at.row / kBlockN,
          listed.head_k,
          at.batch,
          at.row,
          first_block * kV3BackwardRows,
          end_block - first_block,
          at.seqlen_k,
          at.seqlen_q,
          at.q_begin,
          at.k_begin,
          packed_block_of({at.q_begin, at.seqlen_q}, at.batch)};
}

// How many tiles of lower keys meet a block of queries, counted over all heads (from those of the sequence on, of packed ones). Under a mask that
// begins some lower ones do not; but tiles whose keys nobody sees meet the first block of a head.
template <class Mask, int kBlockN, class Keys>
__device__ __forceinline__ int tiles_before(const BackwardCall& p, Keys keys, int tile, int block) {
  if constexpr (Mask::kBegins) {
    const int of_head = block % p.work.row_blocks;
    return of_head == 0 ? tile : tile - Mask::visible_begin(p.call, keys, of_head * kV3BackwardRows) / kBlockN;
  }
  return tile;
}

// Where a batch entry's rows are: in the tensors, and in the workspace. Packed sequences are rows further on in one entry of the tensors.
template <bool kPacked>
struct EntryPlace {
  int batch;
  __device__ __forceinline__ int in_tensor() const { return batch; }
  __device__ __forceinline__ int first_query() const { return 0; }
  __device__ __forceinline__ int first_key() const { return 0; }
  // The first block of a query head's.
  __device__ __forceinline__ long long first_block(const BackwardCall& p, int head) const {
    return (static_cast<long long>(batch) * p.call.nheads + head) * p.work.row_blocks;
  }
  // Rows from the entry's first to the end of memory.
  __device__ __forceinline__ int queries_behind(const AttentionParams& p) const { return p.seqlen_q; }
  __device__ __forceinline__ int keys_behind(const AttentionParams&, int keys) const { return keys; }
};
template <>
struct EntryPlace<true> {
  int batch;
  int q_begin, k_begin, place;
  static __device__ __forceinline__ int in_tensor() { return 0; }
  __device__ __forceinline__ int first_query() const { return q_begin; }
  __device__ __forceinline__ int first_key() const { return k_begin; }
  __device__ __forceinline__ long long first_block(const BackwardCall& p, int head) const {
    return static_cast<long long>(head) * p.work.row_blocks + place;
  }
  __device__ __forceinline__ int queries_behind(const AttentionParams& p) const { return static_cast<int>(pairs_of(p).total_q - q_begin); }
  __device__ __forceinline__ int keys_behind(const AttentionParams& p, int) const { return static_cast<int>(pairs_of(p).total_k - k_begin); }
};

// The first block of a query head's in dq_accum.
__device__ __forceinline__ int ring_block(const BackwardCall& p, int batch, int head) {
  return (batch * p.call.nheads + head) % p.work.ring_heads * p.work.row_blocks;
}

// The tile in shared memory: written once, and read where it is needed, to keep registers free.
struct TilePlace {
  unsigned address;
  template <bool kLengths, bool kPacked>
  __device__ __forceinline__ void write(const KeyTile& tile) const {
    const int of[11] = {tile.number, tile.head_k, tile.batch,   tile.key,     tile.first_row, tile.blocks,
                        tile.keys,   tile.rows,   tile.q_begin, tile.k_begin, tile.place};
#pragma unroll
    for (int i = 0; i < (kPacked ? 11 : kLengths ? 7 : 6); ++i)
      ptx::st_shared_4(address + static_cast<unsigned>(4 * i), static_cast<unsigned>(of[i]));
  }
  __device__ __forceinline__ int at(unsigned index) const { return static_cast<int>(ptx::ld_shared_4(address + 4 * index)); }
  __device__ __forceinline__ int number() const { return at(0); }
  __device__ __forceinline__ int head_k() const { return at(1); }
  __device__ __forceinline__ int batch() const { return at(2); }
  __device__ __forceinline__ int key() const { return at(3); }
  __device__ __forceinline__ int first_row() const { return at(4); }
  __device__ __forceinline__ int blocks() const { return at(5); }
  // Of packed sequences.
  __device__ __forceinline__ int q_begin() const { return at(8); }
  __device__ __forceinline__ int k_begin() const { return at(9); }
  __device__ __forceinline__ int place() const { return at(10); }
  // What is asked of a packed sequence's tile block after block: where the blocks end, how much further rows are in the tensors than in the
  // workspace, and of each 64 keys the last and the first row from which on a block hides no pair of theirs.
  template <class Mask, int kGroups>
  __device__ __forceinline__ void write_limits(const BackwardCall& p, const KeyTile& tile) const {
    static_assert(kGroups <= 3);
    const Keys<false, true> of{tile.keys, tile.rows};
    write_rows_of_sequence(tile);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int key = tile.key + 64 * group, last = row_end<Mask>(p.call, of, key) - kV3BackwardRows;
      const int first = Mask::kUneven ? Mask::first_row(p.call, of, key + 63) : 0;
      ptx::st_shared_8(address + static_cast<unsigned>(4 * 12 + 8 * group),
                       uint2{static_cast<unsigned>(key + 64 > tile.keys ? -1 : last), static_cast<unsigned>(first)});
    }
  }
  __device__ __forceinline__ void write_rows_of_sequence(const KeyTile& tile) const {
    ptx::st_shared_4(address + 4 * 11, static_cast<unsigned>(tile.first_row + tile.blocks * kV3BackwardRows));
    ptx::st_shared_4(address + 4 * 18, static_cast<unsigned>(tile.q_begin - tile.place * kV3BackwardRows));
  }
  // The same of documents, one of the limits.
  __device__ __forceinline__ void write_limits_of(int group, int last, int first) const {
    ptx::st_shared_8(address + static_cast<unsigned>(4 * 12 + 8 * group), uint2{static_cast<unsigned>(last), static_cast<unsigned>(first)});
  }
  __device__ __forceinline__ bool hides(int group, int row) const {
    const uint2 limits = ptx::ld_shared_8(address + static_cast<unsigned>(4 * 12 + 8 * group));
    return row > static_cast<int>(limits.x) || row < static_cast<int>(limits.y);
  }
  __device__ __forceinline__ int further() const { return at(18); }
  template <bool kLengths, bool kPacked>
  __device__ __forceinline__ Keys<kLengths, kPacked> keys() const {
    if constexpr (kPacked)
      return {at(6), at(7)};
    else if constexpr (kLengths)
      return {at(6)};
    else
      return {};
  }
  template <bool kPacked>
  __device__ __forceinline__ EntryPlace<kPacked> entry() const {
    if constexpr (kPacked)
      return {batch(), q_begin(), k_begin(), place()};
    else
      return {batch()};
  }
  // The first row behind the blocks.
  template <class Mask, bool kPacked>
  __device__ __forceinline__ int rows_end(const BackwardCall& p) const {
    if constexpr (kPacked) return at(11);
    if constexpr (Mask::kEnds) return first_row() + blocks() * kV3BackwardRows;
    return p.work.row_blocks * kV3BackwardRows;
  }
  // Of a head's blocks in the workspace, the entry's first: of packed sequences a head has the blocks of all.
  template <bool kPacked>
  __device__ __forceinline__ int place_in_head() const {
    if constexpr (kPacked) return place();
    return 0;
  }
  // The first block of the first query head's in dq_accum.
  template <bool kPacked, bool kRing>
  __device__ __forceinline__ int first_block(const BackwardCall& p) const {
    if constexpr (kPacked)
      return head_k() * p.call.group * p.work.row_blocks + place() + first_row() / kV3BackwardRows;
    else if constexpr (kRing)
      return ring_block(p, batch(), head_k() * p.call.group) + first_row() / kV3BackwardRows;
    else
      return (batch() * p.call.nheads + head_k() * p.call.group) * p.work.row_blocks + first_row() / kV3BackwardRows;
  }
  // From the end of one head's blocks to the beginning of the next one's.
  template <class Mask, bool kPacked>
  __device__ __forceinline__ int blocks_between(const BackwardCall& p) const {
    if constexpr (Mask::kEnds || kPacked) return p.work.row_blocks - blocks();
    return first_row() / kV3BackwardRows;
  }
};

// The block of queries of a CTA of the kernels before and after. The last heads come first: the next kernel then finds the first ones in L2.
template <bool kPacked>
struct QueryBlock {
  EntryPlace<kPacked> entry;
  int head, row;                                                                                    // first
  __device__ __forceinline__ int rows(const AttentionParams& call) const { return call.seqlen_q; }  // of the batch entry
  template <bool kLengths>
  __device__ __forceinline__ Keys<kLengths> keys(const AttentionParams& call) const {
    return Keys<kLengths>::of(call, entry.batch);
  }
};
template <>
struct QueryBlock<true> {
  EntryPlace<true> entry;
  int head, row;
  Keys<false, true> own;
  __device__ __forceinline__ int rows(const AttentionParams&) const { return own.rows; }
  template <bool>
  __device__ __forceinline__ Keys<false, true> keys(const AttentionParams&) const {
    return own;
  }
};

// `first_head`: of the CTAs' heads, counted over the batch.
template <bool kPacked>
__device__ __forceinline__ QueryBlock<kPacked> query_block(const AttentionParams& call, const V3BackwardWork& work, unsigned index,
                                                           int first_head = 0) {
  const unsigned blocks = static_cast<unsigned>(work.row_blocks);
  const unsigned of_first = index / blocks, nth = of_first + static_cast<unsigned>(first_head);
  if constexpr (kPacked) {
    // Whose block it is all threads of the CTA look for together: offsets out of range lead nobody astray who asks for each sequence by itself.
    __shared__ int owner;
    const int block = static_cast<int>(index - of_first * blocks), thread = static_cast<int>(threadIdx.x);
    const PairParams& p = pairs_of(call);
    if (thread == 0) owner = -1;
    __syncthreads();
    for (int n = thread; n < p.batch; n += static_cast<int>(blockDim.x)) {
      const Rows q = given_rows(p.cu_seqlens_q, p.cu_seqlens_q_stride, n, p.total_q, p.seqlen_q);
      const int in_sequence = block - packed_block_of(q, n);
      if (in_sequence >= 0 && in_sequence * kV3BackwardRows < q.count) owner = n;
    }
    __syncthreads();
    const int n = owner;
    if (n < 0) return {};
    const Sequence at = given_sequence(p, n);
    const int place = packed_block_of(at.q, n);
    return {{n, at.q.begin, at.k.begin, place}, static_cast<int>(nth), (block - place) * kV3BackwardRows, {at.k.count, at.q.count}};
  } else {
    const unsigned batch = nth / static_cast<unsigned>(call.nheads);
    return {{static_cast<int>(batch)},
            static_cast<int>(nth - batch * static_cast<unsigned>(call.nheads)),
            static_cast<int>(index - of_first * blocks) * kV3BackwardRows};
  }
}

// The same after a main kernel whose tiles come head beside head, lower keys and with them lower rows first: what it added to last is in L2.
__device__ __forceinline__ QueryBlock<false> query_block_of_window(const AttentionParams& call, const V3BackwardWork& work) {
  const int index = static_cast<int>(gridDim.x - 1 - blockIdx.x), per_section = call.heads_per_section * call.group;
  const int section = index / (per_section * work.row_blocks), first_head = section * per_section;
  const int heads = min(per_section, call.batch * call.nheads - first_head), in_section = index - first_head * work.row_blocks;
  const int row = in_section / heads, nth = first_head + in_section - row * heads, batch = nth / call.nheads;
  return {{batch}, nth - batch * call.nheads, row * kV3BackwardRows};
}

// The first element of a query head's rows in lse_log2 and row_sum.
template <bool kPacked>
__device__ __forceinline__ long long first_workspace_row(const BackwardCall& p, const EntryPlace<kPacked>& entry, int head) {
  return entry.first_block(p, head) * kV3BackwardRows;
}

}  // namespace fattn::v3
