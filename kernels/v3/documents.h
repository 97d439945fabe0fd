// Documents in algorithm v3. A kernel before a pass looks through the ids: for each 64 queries it finds the range of blocks of keys that they can
// see, and where in it nothing is hidden. Blocks at its ends, or all of queries of several documents, are masked by the ids of their keys. Backward
// it is the same for each 64 keys and blocks of queries.
//
// Ids of any order are taken. Of sorted ones the ranges are as short as they can be.
#pragma once

#include "device_abi/v3_backward_work.h"
#include "device_abi/v3_documents.h"
#include "device_abi/v3_packed_tiles.h"
#include "kernels/pair.h"
#include "kernels/ptx/dependent_launch.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/ptx/warp.h"
#include "kernels/sequence.h"
#include "kernels/v3/mask.h"

namespace fattn::v3 {

// Where the workspace has what belongs to a batch entry: of queries, or of keys (kOfKeys), 64 at a time, and the ids of the others in blocks of
// kBlockN.
template <int kBlockM, int kBlockN, bool kOfKeys>
struct DocumentPlace {
  static __device__ __forceinline__ int own(const AttentionParams& p) { return kOfKeys ? p.seqlen_k : p.seqlen_q; }
  static __device__ __forceinline__ int others(const AttentionParams& p) { return kOfKeys ? p.seqlen_q : p.seqlen_k; }
  static __device__ __forceinline__ V3DocumentBlocks* blocks(const AttentionParams& p, int entry) {
    return static_cast<V3DocumentBlocks*>(pairs_of(p).tiles) + entry * v3_document_records(own(p), kBlockM);
  }
  static __device__ __forceinline__ int* ids(const AttentionParams& p, int entry) {
    return reinterpret_cast<int*>(blocks(p, p.batch)) + entry * v3_document_keys(others(p), kBlockN);
  }
};

// The same of a packed sequence, behind the list of tiles: each part begins where that of the sequence's first row would, plus one for each sequence
// before it, so that none has rows of two where offsets do not descend.
template <int kBlockM, int kBlockN>
struct PackedDocumentPlace {
  static __device__ __forceinline__ long long tiles(const AttentionParams& p) { return most_packed_tiles(pairs_of(p).total_q, p.batch, kBlockM); }
  static __device__ __forceinline__ V3DocumentBlocks* all_blocks(const AttentionParams& p) {
    const long long list = static_cast<long long>(sizeof(V3PackedTiles)) + tiles(p) * static_cast<long long>(sizeof(V3PackedTile));
    return reinterpret_cast<V3DocumentBlocks*>(static_cast<char*>(pairs_of(p).tiles) + list);
  }
  static __device__ __forceinline__ V3DocumentBlocks* blocks(const AttentionParams& p, int q_begin, int n) {
    return all_blocks(p) + (q_begin / kBlockM + n) * (kBlockM / kV3DocumentRows);
  }
  static __device__ __forceinline__ int* all_ids(const AttentionParams& p) {
    return reinterpret_cast<int*>(all_blocks(p) + tiles(p) * (kBlockM / kV3DocumentRows));
  }
  static __device__ __forceinline__ int first_id(int k_begin, int n) { return (k_begin / kBlockN + n) * kBlockN; }
};

// Backward, the same behind the list of tiles of keys, of which there are `key_tiles`: of each 64 keys, however many a tile has, and the ids of
// queries in the blocks that packed_block_of() counts (v3/backward_schedule.h).
struct PackedDocumentQueries {
  static_assert(kV3DocumentRows == kV3BackwardRows);
  static __device__ __forceinline__ V3DocumentBlocks* all_blocks(const AttentionParams& p, int key_tiles) {
    return reinterpret_cast<V3DocumentBlocks*>(static_cast<V3PackedTile*>(pairs_of(p).tiles) + key_tiles);
  }
  static __device__ __forceinline__ V3DocumentBlocks* blocks(const AttentionParams& p, int key_tiles, int k_begin, int n) {
    return all_blocks(p, key_tiles) + k_begin / kV3DocumentRows + n;
  }
  static __device__ __forceinline__ int* ids(const AttentionParams& p, int key_tiles, int block) {
    return reinterpret_cast<int*>(all_blocks(p, key_tiles) + most_packed_tiles(pairs_of(p).total_k, p.batch, kV3DocumentRows)) +
           block * kV3BackwardRows;
  }
};

// The keys of a tile (v3/mask.h), and what their ids say: read before the tile begins.
template <class Keys, int kBlockM, int kBlockN>
struct DocumentKeys : Keys {
  using Place = DocumentPlace<kBlockM, kBlockN, false>;
  static constexpr int kTileRows = kBlockM;
  int entry;
  int begin, end;          // blocks of keys that the tile sees
  int own_end;             // the same of the warpgroup
  int one_begin, one_end;  // blocks that hide nothing from the warpgroup: its queries and their keys are all of one document

  // `row`: the tile's first.
  static __device__ __forceinline__ DocumentKeys of(const AttentionParams& p, int entry, int row, int group) {
    const int4* const at = reinterpret_cast<const int4*>(Place::blocks(p, entry) + row / kV3DocumentRows);
    const int4 first = at[0], own = at[group];
    int begin = first.x, end = first.y;
#pragma unroll
    for (int i = 1; i < kBlockM / kV3DocumentRows; ++i) {
      const int2 other = *reinterpret_cast<const int2*>(at + i);
      begin = min(begin, other.x);
      end = max(end, other.y);
    }
    return {Keys::of(p, entry), entry, begin, end, own.y, own.z, own.w};
  }
  // Where the blocks of all rows of the tile end, or of those of the warpgroup.
  __device__ __forceinline__ int end_of(int count) const { return count < kTileRows ? own_end : end; }
  // Of the tile that has the row.
  static __device__ __forceinline__ int tile_of(int row) { return row / kBlockM * kBlockM; }
  __device__ __forceinline__ int id_of_query(const AttentionParams& p, int row) const {
    return pairs_of(p).document_q[entry * pairs_of(p).document_q_stride + min(row, p.seqlen_q - 1)];
  }
  __device__ __forceinline__ const int* ids_of_block(const AttentionParams& p, int block) const { return Place::ids(p, entry) + block * kBlockN; }
};

// The same of a packed sequence's tile.
template <int kBlockM, int kBlockN>
struct PackedDocumentKeys : Keys<false, true> {
  using Place = PackedDocumentPlace<kBlockM, kBlockN>;
  static constexpr int kTileRows = kBlockM;
  int q_begin, first_id;  // of the sequence
  int begin, end, own_end, one_begin, one_end;

  // `of_sequence`: the sequence's own; `row`: the tile's first in it.
  static __device__ __forceinline__ PackedDocumentKeys of(const AttentionParams& p, Keys<false, true> of_sequence, int q_begin, int k_begin, int n,
                                                          int row, int group) {
    const int4* const at = reinterpret_cast<const int4*>(Place::blocks(p, q_begin, n) + row / kV3DocumentRows);
    const int4 first = at[0], own = at[group];
    int begin = first.x, end = first.y;
#pragma unroll
    for (int i = 1; i < kBlockM / kV3DocumentRows; ++i) {
      const int2 other = *reinterpret_cast<const int2*>(at + i);
      begin = min(begin, other.x);
      end = max(end, other.y);
    }
    return {of_sequence, q_begin, Place::first_id(k_begin, n), begin, end, own.y, own.z, own.w};
  }
  __device__ __forceinline__ int end_of(int count) const { return count < kTileRows ? own_end : end; }
  static __device__ __forceinline__ int tile_of(int row) { return row / kBlockM * kBlockM; }
  __device__ __forceinline__ int id_of_query(const AttentionParams& p, int row) const {
    return pairs_of(p).document_q[q_begin + min(row, this->rows - 1)];
  }
  __device__ __forceinline__ const int* ids_of_block(const AttentionParams& p, int block) const {
    return Place::all_ids(p) + first_id + block * kBlockN;
  }
};

// How many blocks of keys the documents leave a tile of kBlockM rows, of [begin, end) which its mask does. `found`: of the tile's first rows.
template <int kBlockM>
__device__ __forceinline__ int blocks_of_documents(const V3DocumentBlocks* found, int begin, int end) {
  int least = found[0].begin, most = found[0].end;
#pragma unroll
  for (int i = 1; i < kBlockM / kV3DocumentRows; ++i) {
    least = min(least, found[i].begin);
    most = max(most, found[i].end);
  }
  return min(end, most) - max(begin, least);
}

// The kernel before: a warp takes 64 queries (or keys, kOfKeys), and all warps of a CTA together find the least and greatest id of each block of the
// others, which are called keys here.
template <int kBlockM, int kBlockN, bool kOfKeys, bool kPacked>
struct DocumentRanges {
  static constexpr int kWarps = kV3DocumentThreads / 32, kMost = 0x7fffffff, kLeast = -kMost - 1;
  static constexpr int kBlocksAtOnce = 1024;
  struct Ids {
    int least = kMost, most = kLeast;
    __device__ __forceinline__ void add(int id) { least = min(least, id), most = max(most, id); }
    __device__ __forceinline__ void of_warp() {
#pragma unroll
      for (int lanes = 1; lanes < 32; lanes *= 2) {
        least = min(least, static_cast<int>(ptx::shfl_xor(static_cast<unsigned>(least), lanes)));
        most = max(most, static_cast<int>(ptx::shfl_xor(static_cast<unsigned>(most), lanes)));
      }
    }
  };

  // The least and greatest id of a block that begins with `key`; its ids are copied if `copy`, those behind the last key as that one's.
  static __device__ __forceinline__ int2 look_at_block(const int* ids, int key, int keys, int* copy, int lane) {
    Ids of_block;
    for (int i = key + lane; i < key + kBlockN; i += 32) {
      const int id = ids[min(i, keys - 1)];
      of_block.add(id);
      if (copy != nullptr) copy[i] = id;
    }
    of_block.of_warp();
    return {of_block.least, of_block.most};
  }

  // What a CTA looks through: a part of the queries of a batch entry, or of a sequence, and all its keys.
  struct Share {
    int queries, keys;
    const int *own_ids, *ids;
    V3DocumentBlocks* found;
    int* copy;
    int part;
    __device__ __forceinline__ int records() const { return static_cast<int>(v3_document_records(queries, kBlockM)); }
    __device__ __forceinline__ int parts() const { return (records() + kWarps - 1) / kWarps; }
  };
  static __device__ __forceinline__ Share share_of_entry(const PairParams& p) {
    using Place = DocumentPlace<kBlockM, kBlockN, kOfKeys>;
    Share share{Place::own(p), Place::others(p), nullptr, nullptr, nullptr, nullptr, 0};
    const int parts = share.parts(), entry = static_cast<int>(blockIdx.x) / parts;
    const int *const q = p.document_q + entry * p.document_q_stride, *const k = p.document_k + entry * p.document_k_stride;
    share.own_ids = kOfKeys ? k : q;
    share.ids = kOfKeys ? q : k;
    share.found = Place::blocks(p, entry);
    share.copy = Place::ids(p, entry);
    share.part = static_cast<int>(blockIdx.x) % parts;
    return share;
  }
  // A sequence's CTAs are those from the one on that would have its first row. All threads of the CTA look for the one that has it.
  static __device__ __forceinline__ Share share_of_sequence(const PairParams& p, int key_tiles) {
    constexpr int kRows = kV3DocumentCtaRows;
    static_assert(kRows % kBlockM == 0 && (!kOfKeys || (kBlockM == kV3DocumentRows && kBlockN == kV3BackwardRows)));
    __shared__ int owner;
    const int cta = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
    if (thread == 0) owner = -1;
    __syncthreads();
    for (int n = thread; n < p.batch; n += kV3DocumentThreads) {
      const Rows own = kOfKeys ? given_rows(p.cu_seqlens_k, p.cu_seqlens_k_stride, n, p.total_k, p.seqlen_k)
                               : given_rows(p.cu_seqlens_q, p.cu_seqlens_q_stride, n, p.total_q, p.seqlen_q);
      const int part = cta - (own.begin / kRows + n);
      if (part >= 0 && part * static_cast<long long>(kRows) < own.count) owner = n;
    }
    __syncthreads();
    if (owner < 0) return {};
    const Sequence at = given_sequence(p, owner);
    const int *const q = p.document_q + at.q.begin, *const k = p.document_k + at.k.begin;
    if constexpr (kOfKeys) {
      using Place = PackedDocumentQueries;
      return {at.k.count,
              at.q.count,
              k,
              q,
              Place::blocks(p, key_tiles, at.k.begin, owner),
              Place::ids(p, key_tiles, at.q.begin / kV3BackwardRows + owner),
              cta - (at.k.begin / kRows + owner)};
    } else {
      using Place = PackedDocumentPlace<kBlockM, kBlockN>;
      return {at.q.count,
              at.k.count,
              q,
              k,
              Place::blocks(p, at.q.begin, owner),
              Place::all_ids(p) + Place::first_id(at.k.begin, owner),
              cta - (at.q.begin / kRows + owner)};
    }
  }
  static __device__ __forceinline__ Share own_share(const PairParams& p, int key_tiles) {
    if constexpr (kPacked)
      return share_of_sequence(p, key_tiles);
    else
      return share_of_entry(p);
  }

  // `key_tiles`: in the list of a backward pass over packed sequences.
  static __device__ __forceinline__ void run(const PairParams& p, int key_tiles) {
    ptx::let_kernel_after_come_up();
    __shared__ int2 bounds[kBlocksAtOnce];
    const auto [warp, lane] = ptx::thread_place();
    const Share share = own_share(p, key_tiles);
    const int queries = share.queries, keys = share.keys;
    if (kPacked && queries == 0) {
      if constexpr (kOfKeys) ptx::wait_for_kernel_before();  // as below
      return;
    }
    const int records = share.records(), parts = share.parts(), part = share.part;
    const int record = part * kWarps + warp, row = record * kV3DocumentRows;
    Ids own;
    const int blocks = (keys + kBlockN - 1) / kBlockN;
    const int* const own_ids = share.own_ids;
    for (int i = row + lane; i < min(row + kV3DocumentRows, queries) && blocks > 0; i += 32) own.add(own_ids[i]);
    own.of_warp();

    const int* const ids = share.ids;
    int* const copy = share.copy;
    V3DocumentBlocks seen{kMost, 0, 0, 0};
    bool goes_on = false;  // the last of the blocks that were looked at is one with [one_begin, one_end)
    for (int first = 0; first < blocks; first += kBlocksAtOnce) {
      const int count = min(kBlocksAtOnce, blocks - first);
      __syncthreads();
      for (int i = warp; i < count; i += kWarps) {
        const int block = first + i;
        const int2 found = look_at_block(ids, block * kBlockN, keys, block % parts == part ? copy : nullptr, lane);
        if (lane == 0) bounds[i] = found;
      }
      __syncthreads();
      for (int from = 0; from < count; from += 32) {
        const int2 ids_of_block = from + lane < count ? bounds[from + lane] : int2{kMost, kLeast};
        const unsigned common = ptx::ballot(own.least <= ids_of_block.y && ids_of_block.x <= own.most);
        const unsigned whole = ptx::ballot(own.least == own.most && ids_of_block.x == own.least && ids_of_block.y == own.least);
        if (common != 0) {
          seen.begin = min(seen.begin, first + from + __ffs(static_cast<int>(common)) - 1);
          seen.end = first + from + 32 - __clz(static_cast<int>(common));
        }
        if (whole != 0) {  // the last of its runs
          const int end = 32 - __clz(static_cast<int>(whole));
          const unsigned others = ~whole & (end == 32 ? 0xffffffffu : (1u << end) - 1);
          if (others != 0)
            seen.one_begin = first + from + 32 - __clz(static_cast<int>(others));
          else if (!goes_on)
            seen.one_begin = first + from;
          seen.one_end = first + from + end;
        }
        goes_on = whole >> 31 != 0;
      }
    }
    if (row >= queries || blocks == 0) seen = {kMost, 0, 0, kMost};  // nothing that matters is hidden
    if (lane == 0 && record < records) share.found[record] = seen;
    if constexpr (kOfKeys) ptx::wait_for_kernel_before();  // so that who waits for this one sees what that one wrote, too
  }
};

template <int kBlockM, int kBlockN, bool kOfKeys, bool kPacked = false>
__device__ __forceinline__ void document_ranges(const PairParams& p) {
  static_assert(!(kOfKeys && kPacked));
  DocumentRanges<kBlockM, kBlockN, kOfKeys, kPacked>::run(p, 0);
}
// Of a backward pass over packed sequences.
__device__ __forceinline__ void document_ranges_of_packed_keys(const PairParams& p, const V3BackwardWork& work) {
  DocumentRanges<kV3DocumentRows, kV3BackwardRows, true, true>::run(p, work.key_tiles);
}

}  // namespace fattn::v3
