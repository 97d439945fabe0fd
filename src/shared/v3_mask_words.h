// A mask of pairs as algorithm v3 takes it, in the workspace: a bit a pair, in words of the threads that have the pairs
// (kernels/v3/mask_words.h). Include-free, used by the host too.
#pragma once

namespace fattn {

inline constexpr int kV3MaskThreads = 128;               // of each CTA that writes them, and of a warpgroup
inline constexpr int kV3MaskSide = 64;                   // queries of a block, and keys
inline constexpr int kV3MaskCtaKeys = 4 * kV3MaskSide;   // that a CTA takes, of a block of queries
inline constexpr int kV3MaskBytes = 4 * kV3MaskThreads;  // of a block of queries and 64 keys

// Blocks of queries and of keys: of a mask that has one row for all, one of queries.
constexpr long long v3_mask_blocks(long long rows) { return (rows + kV3MaskSide - 1) / kV3MaskSide; }
// Blocks of keys that a row of them has words for: forward an even number, because a thread takes up to two at once.
template <class Int>
constexpr Int v3_mask_key_blocks(Int seqlen_k, bool forward) {
  return forward ? (seqlen_k + 2 * kV3MaskSide - 1) / (2 * kV3MaskSide) * 2 : (seqlen_k + kV3MaskSide - 1) / kV3MaskSide;
}
// CTAs that write a row of blocks.
constexpr long long v3_mask_ctas(long long seqlen_k) { return (seqlen_k + kV3MaskCtaKeys - 1) / kV3MaskCtaKeys; }

}  // namespace fattn
