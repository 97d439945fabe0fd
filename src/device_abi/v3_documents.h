// Documents as algorithm v3 takes them, in the workspace: of each batch entry which blocks of keys its queries can see, kV3DocumentRows queries at a
// time; then the ids of its keys, filled up to whole blocks. In the backward pass keys and queries change places. Packed sequences
// have theirs behind the list of tiles (v3_packed_tiles.h). Include-free, used by the host too.
#pragma once

namespace fattn {

inline constexpr int kV3DocumentThreads = 512;  // of each CTA that writes them
inline constexpr int kV3DocumentRows = 64;      // queries of a warpgroup (backward: keys)
inline constexpr int kV3DocumentCtaRows = kV3DocumentThreads / 32 * kV3DocumentRows;

// Blocks outside of [begin, end) have no key of an id that is neither below nor above all those of the queries. In [one_begin, one_end) all keys and
// all queries have one id.
struct alignas(16) V3DocumentBlocks {
  int begin, end;
  int one_begin, one_end;
};
static_assert(sizeof(V3DocumentBlocks) == 16);

// Of a batch entry: those of whole tiles of queries; ids of keys.
constexpr long long v3_document_records(long long seqlen_q, int block_m) { return (seqlen_q + block_m - 1) / block_m * (block_m / kV3DocumentRows); }
constexpr long long v3_document_keys(long long seqlen_k, int block_n) { return (seqlen_k + block_n - 1) / block_n * block_n; }
constexpr long long v3_document_bytes(long long seqlen_q, int block_m, long long seqlen_k, int block_n) {
  return v3_document_records(seqlen_q, block_m) * static_cast<long long>(sizeof(V3DocumentBlocks)) +
         v3_document_keys(seqlen_k, block_n) * static_cast<long long>(sizeof(int));
}
// Of packed sequences each may have a part of a tile of queries, and of a block of keys, that is not full (most_packed_tiles()).
constexpr long long v3_packed_document_bytes(long long total_q, int block_m, long long total_k, int block_n, long long batch) {
  return (total_q / block_m + batch) * (block_m / kV3DocumentRows) * static_cast<long long>(sizeof(V3DocumentBlocks)) +
         (total_k / block_n + batch) * block_n * static_cast<long long>(sizeof(int));
}
// CTAs that write them: a warp takes kV3DocumentRows queries.
constexpr long long v3_document_ctas(long long seqlen_q, int block_m) {
  return (v3_document_records(seqlen_q, block_m) + kV3DocumentThreads / 32 - 1) / (kV3DocumentThreads / 32);
}

}  // namespace fattn
