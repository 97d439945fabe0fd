// In which order a tile of queries meets its blocks of keys: from the last that its rows see to the first, so that blocks which an edge of a mask
// crosses come first, and references with them (v3/softmax.h).
//
// With ALiBi and keys behind a row, a row's greatest weights are near the key that it is aligned with, wherever that is: the tile then begins with
// the block of its last row's, goes down to the first block, and from the last one down to where it began. References are right from then on, as they
// are without terms: besides blocks that the diagonal crosses only the last one takes a maximum, because keys may end in it.
#pragma once

#include "kernels/pair.h"
#include "kernels/v3/alibi.h"
#include "kernels/v3/schedule.h"

namespace fattn::v3 {

// Not of windows and documents, which have few blocks behind a row as a rule.
template <class Spec>
inline constexpr bool kFromDiagonal = kPairOf<Spec>.alibi && !kPairOf<Spec>.documents && !Spec::Mask::kCausal && !Spec::Mask::kBegins;

// Of the tile that begins with query `row`.
template <class Spec, int kBlockM, class Keys>
__device__ __forceinline__ int first_block(const AttentionParams& p, Keys keys, int row) {
  const int last = block_end<typename Spec::Mask, Spec::kBlockN>(p, keys, row, kBlockM) - 1;
  if constexpr (kFromDiagonal<Spec>) return min(last, max(0, aligned_key(p, keys, row + kBlockM - 1)) / Spec::kBlockN);
  return last;
}
// With kFromDiagonal, the one after `block`; -1 after the last.
template <class Spec, int kBlockM, class Keys>
__device__ __forceinline__ int block_after(const AttentionParams& p, Keys keys, int row, int block) {
  const int next = (block > 0 ? block : block_end<typename Spec::Mask, Spec::kBlockN>(p, keys, row, kBlockM)) - 1;
  return next == first_block<Spec, kBlockM>(p, keys, row) ? -1 : next;
}

}  // namespace fattn::v3
