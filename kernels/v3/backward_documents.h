// Documents in the v3 backward kernel: a tile of keys meets the blocks of queries that the ids of their documents leave it (v3/documents.h), and
// hides pairs in those that are not of one document.
#pragma once

#include "kernels/pair.h"
#include "kernels/v3/backward_fragments.h"
#include "kernels/v3/backward_schedule.h"
#include "kernels/v3/backward_shape.h"
#include "kernels/v3/documents.h"

namespace fattn::v3 {

template <class Spec>
using DocumentQueries = DocumentPlace<BackwardShape<Spec>::kBlockN, kV3BackwardRows, true>;

// The tile with the blocks of queries that both its mask and its documents leave, at least one; and from which row to which a block hides no pair of
// each 64 keys. By one thread.
template <class Spec>
__device__ __forceinline__ void write_document_tile(const BackwardCall& p, TilePlace place, KeyTile tile) {
  using Shape = BackwardShape<Spec>;
  using Mask = typename Spec::Mask;
  constexpr bool kLengths = kPairOf<Spec>.lengths, kPacked = kPairOf<Spec>.packed;
  const auto keys = [&] {
    if constexpr (kPacked)
      return Keys<false, true>{tile.keys, tile.rows};
    else if constexpr (kLengths)
      return Keys<true>{tile.keys};
    else
      return Keys<false>{};
  }();
  const V3DocumentBlocks* of;
  if constexpr (kPacked) {
    if (tile.number < 0 || tile.rows == 0) return place.write<false, true>(tile);  // nothing is computed for it
    of = PackedDocumentQueries::blocks(p.call, p.work.key_tiles, tile.k_begin, tile.batch) + tile.key / kV3DocumentRows;
  } else {
    of = DocumentQueries<Spec>::blocks(p.call, tile.batch) + tile.key / kV3DocumentRows;
  }
  int begin = tile.first_row / kV3BackwardRows, end = begin + tile.blocks, least = of[0].begin, most = of[0].end;
#pragma unroll
  for (int group = 0; group < Shape::kKeyGroups; ++group) {
    const int key = tile.key + 64 * group;
    const bool exists = !kPacked || key < tile.keys;  // behind a sequence's last keys there are no blocks of its
    const V3DocumentBlocks seen = exists ? of[group] : of[0];
    least = min(least, seen.begin);
    most = max(most, seen.end);
    const int last = min(row_end<Mask>(p.call, keys, key), min(seen.one_end, p.work.row_blocks) * kV3BackwardRows);
    place.write_limits_of(group, key + 64 > keys.count(p.call) ? -1 : last - kV3BackwardRows,
                          max(Mask::first_row(p.call, keys, key + 63), seen.one_begin * kV3BackwardRows));
  }
  begin = min(max(begin, least), end - 1);
  end = max(begin + 1, min(end, most));
  tile.first_row = begin * kV3BackwardRows;
  tile.blocks = end - begin;
  place.write<kLengths, kPacked>(tile);
  if constexpr (kPacked) place.write_rows_of_sequence(tile);
}

// As hide(), of pairs of two documents.
template <class Spec>
__device__ __forceinline__ void hide_other_documents(float (&x)[32], const BackwardCall& p, EntryPlace<kPairOf<Spec>.packed> at, int key, int row) {
  const PairParams& pairs = pairs_of(p.call);
  const int own_key = key + static_cast<int>(own_warp_row() + own_lane() / 4), last_key = at.keys_behind(p.call, p.call.seqlen_k) - 1;
  const int* const of_keys = pairs.document_k + at.in_tensor() * pairs.document_k_stride + at.first_key();
  const int id0 = of_keys[min(own_key, last_key)], id1 = of_keys[min(own_key + 8, last_key)];
  const int* ids;
  if constexpr (kPairOf<Spec>.packed)
    ids = PackedDocumentQueries::ids(p.call, p.work.key_tiles, at.place);
  else
    ids = DocumentQueries<Spec>::ids(p.call, at.batch);
  const int2* const of_queries = reinterpret_cast<const int2*>(ids + row) + own_lane() % 4;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int2 id = of_queries[4 * i];
    if (id.x != id0) x[4 * i] = kHiddenWeight;
    if (id.y != id0) x[4 * i + 1] = kHiddenWeight;
    if (id.x != id1) x[4 * i + 2] = kHiddenWeight;
    if (id.y != id1) x[4 * i + 3] = kHiddenWeight;
  }
}

}  // namespace fattn::v3
