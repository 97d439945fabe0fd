// Which tile of queries a CTA computes, and which blocks of keys that tile meets.
#pragma once

#include "device_abi/attention_params.h"
#include "device_abi/mask.h"
#include "kernels/documents.h"

namespace fattn::v2 {

struct Place {
  int batch, head, head_k;
  int row;  // first query of the tile
};

// Tiles of one section of (batch, head) pairs run side by side, those of the last queries (under a causal mask the longest) first.
// kEntriesTogether: the batch entries of a head are neighbours, which may share what lies by pair, a bias.
template <int kBlockM, bool kEntriesTogether = false>
__device__ __forceinline__ Place place_of(const AttentionParams& p, int index) {
  const int tiles = (p.seqlen_q + kBlockM - 1) / kBlockM;
  const int per_section = p.heads_per_section * tiles;
  const int section = index / per_section;
  const int in_section = index - section * per_section;
  const int first_head = section * p.heads_per_section;
  const int heads = min(p.heads_per_section, p.batch * p.nheads - first_head);
  const int tile = tiles - 1 - in_section / heads;
  const int head = first_head + in_section % heads;
  const int major = head / (kEntriesTogether ? p.batch : p.nheads), minor = head - major * (kEntriesTogether ? p.batch : p.nheads);
  const int batch = kEntriesTogether ? minor : major;
  const int nth = kEntriesTogether ? major : minor;
  return {batch, nth, nth / p.group, tile * kBlockM};
}

// Blocks [whole_begin, whole_end) are seen by every row of the tile (none is if whole_begin is not below whole_end), the others of [begin, end) by
// some.
struct KeyBlocks {
  int begin, whole_begin, whole_end, end;
};

template <int kBlockM, int kBlockN>
__device__ __forceinline__ KeyBlocks key_blocks(const core::Mask32& mask, int row) {
  const int last = min(row + kBlockM, mask.seqlen_q) - 1;
  const int first_end = mask.visible_end(row);
  const int last_end = mask.visible_end(last);
  return {mask.visible_begin(row) / kBlockN, (mask.visible_begin(last) + kBlockN - 1) / kBlockN, first_end / kBlockN,
          (last_end + kBlockN - 1) / kBlockN};
}

// Those of `seen` whose documents a query of the tile is of. All kThreads threads of the CTA, before anything is in its shared memory: there it
// leaves the least and the greatest id of the queries in the first two of four `slots`, which are free behind the caller's next barrier.
template <int kThreads, int kBlockM, int kBlockN>
__device__ __forceinline__ KeyBlocks blocks_of_documents(const PairParams& p, const Place& place, KeyBlocks seen, int seqlen_k, int* slots) {
  const IdRange range =
      common_range<kThreads>(p.document_q + place.batch * p.document_q_stride + place.row, min(kBlockM, p.seqlen_q - place.row),
                             p.document_k + place.batch * p.document_k_stride, seen.begin * kBlockN, min(seen.end * kBlockN, seqlen_k), slots);
  seen.end = (range.end + kBlockN - 1) / kBlockN;
  seen.begin = range.begin / kBlockN;
  if (range.begin == range.end) seen.begin = seen.end = 0;
  return seen;
}

}  // namespace fattn::v2
