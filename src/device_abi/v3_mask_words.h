// A mask of pairs as algorithm v3 takes it, in the workspace: a bit a pair, in words of the threads that have the pairs
// (kernels/v3/mask_words.h). Include-free, used by the host too.
#pragma once

namespace fattn {

inline constexpr int kV3MaskThreads = 128;               // of a warpgroup, and of each team of threads that writes words
inline constexpr int kV3MaskSide = 64;                   // queries of a block, and keys
inline constexpr int kV3MaskTeamKeys = 4 * kV3MaskSide;  // that a team takes at once, of a block of queries
inline constexpr int kV3MaskBytes = 4 * kV3MaskThreads;  // of a block of queries and 64 keys

// Blocks of queries and of keys: of a mask that has one row for all, one of queries.
constexpr long long v3_mask_blocks(long long rows) { return (rows + kV3MaskSide - 1) / kV3MaskSide; }
// Blocks of keys that a row of them has words for: forward an even number, because a thread takes up to two at once.
template <class Int>
constexpr Int v3_mask_key_blocks(Int seqlen_k, bool forward) {
  return forward ? (seqlen_k + 2 * kV3MaskSide - 1) / (2 * kV3MaskSide) * 2 : (seqlen_k + kV3MaskSide - 1) / kV3MaskSide;
}
// Teams of a CTA, and the keys that it takes. Forward it takes many, because it says which of their blocks hide everything.
constexpr int v3_mask_teams(bool forward) { return forward ? 4 : 1; }
constexpr int v3_mask_cta_keys(bool forward) { return kV3MaskTeamKeys * (forward ? 16 : 1); }
// CTAs that write a row of blocks.
template <class Int>
constexpr Int v3_mask_ctas(Int seqlen_k, bool forward) {
  return (seqlen_k + v3_mask_cta_keys(forward) - 1) / v3_mask_cta_keys(forward);
}

// Before the words, the first one last, are numbers that say which blocks hide everything. Backward a byte for each block of queries and 64 keys, of
// 64 keys side by side: whether it shows any pair. Forward, of the keys that a CTA takes of a block of queries: the blocks [begin, end), counted from
// the first key of all, before and behind which everything is hidden, in halves of a number: the end, and above it what begin lacks to
// kV3MaskMostBlocks, so that the greatest of both halves are the range of all.
inline constexpr int kV3MaskMostBlocks = 0xffff;
constexpr unsigned v3_mask_range(int begin, int end) { return static_cast<unsigned>(kV3MaskMostBlocks - begin) << 16 | static_cast<unsigned>(end); }
constexpr int v3_mask_range_begin(unsigned range) { return kV3MaskMostBlocks - static_cast<int>(range >> 16); }
constexpr int v3_mask_range_end(unsigned range) { return static_cast<int>(range & 0xffffu); }

}  // namespace fattn
