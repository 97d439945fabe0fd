// A mask of pairs in v3's forward pass: each consumer thread reads the words of its own pairs of a block (v3/mask_words.h) before it waits for its
// scores, and hides what they do not show when these are there.
#pragma once

#include "kernels/constants.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/ptx/warp.h"
#include "kernels/v3/forward_shape.h"
#include "kernels/v3/mask_words.h"
#include "kernels/v3/schedule.h"

namespace fattn::v3 {

// Without a mask: nothing.
template <class Spec, bool kMask>
struct VisiblePairs {
  template <class Place>
  __device__ __forceinline__ void begin(const ForwardCall&, const Place&, int) {}
  __device__ __forceinline__ void read(const ForwardCall&, int) {}
  template <class Scores>
  __device__ __forceinline__ void hide(Scores&) const {}
};

template <class Spec>
struct VisiblePairs<Spec, true> {
  static constexpr int kBlockN = Spec::kBlockN, kWords = kBlockN / kV3MaskSide;
  static_assert(kBlockN % kV3MaskSide == 0 && kWords <= 2, "v3_mask_key_blocks()");

  int first;  // number of the block of the warpgroup's rows and the first keys
  unsigned words[kWords];

  // A tile, of warpgroup `group`. Rows behind the last take another's words: nobody reads what they get.
  __device__ __forceinline__ void begin(const ForwardCall& p, const Place& place, int group) {
    first = MaskWordsPlace<true>{pairs_of(p.call)}.block(place.batch, place.head, min(place.row + 64 * group, p.call.seqlen_q - 1), 0);
  }
  // Those of block `of`. Volatile: it stays where it is, ahead of the wait for the scores.
  __device__ __forceinline__ void read(const ForwardCall& p, int of) {
    const unsigned* const from = MaskWordsPlace<true>{pairs_of(p.call)}.words(first + of * kWords) + ptx::opaque(static_cast<int>(threadIdx.x)) % 128;
#pragma unroll
    for (int i = 0; i < kWords; ++i) asm volatile("ld.global.u32 %0, [%1];" : "=r"(words[i]) : "l"(from + i * kV3MaskThreads) : "memory");
  }
  // All lanes of a warp together: most blocks of most masks hide all or nothing.
  __device__ __forceinline__ void hide(float (&s)[kBlockN / 2]) const {
    bool all = true;
#pragma unroll
    for (const unsigned word : words) all = all && word == 0xffffffffu;
    if (ptx::vote_all(all)) return;
#pragma unroll
    for (int i = 0; i < kBlockN / 2; ++i)
      if ((words[i / 32] & 1u << i % 32) == 0) s[i] = -kInfinity;
  }
};

}  // namespace fattn::v3
