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
  __device__ __forceinline__ int first_block(const ForwardCall&) const { return 0; }
  __device__ __forceinline__ void read(const ForwardCall&, int) {}
  template <class Scores>
  __device__ __forceinline__ void hide(Scores&, unsigned) const {}
};

template <class Spec>
struct VisiblePairs<Spec, true> {
  static constexpr int kBlockN = Spec::kBlockN, kWords = kBlockN / kV3MaskSide;
  static_assert(kBlockN % kV3MaskSide == 0 && kWords <= 2, "v3_mask_key_blocks()");

  unsigned first;  // number of the thread's word of the first keys that the tile sees
  unsigned words[kWords];

  // A tile, of warpgroup `group`, from its block `begin` on. Rows behind the last take another's words: nobody reads what they get.
  __device__ __forceinline__ void begin(const ForwardCall& p, const Place& place, int group, int begin) {
    const int block = MaskWordsPlace<true>{pairs_of(p.call)}.block(place.batch, place.head, min(place.row + 64 * group, p.call.seqlen_q - 1), 0);
    first = static_cast<unsigned>(block + begin * kWords) * kV3MaskThreads + threadIdx.x % kV3MaskThreads;
  }
  // The tile's first block, which the consumer counts from: found again where it is wanted, because a register of its own would be one too many.
  __device__ __forceinline__ int first_block(const ForwardCall& p) const {
    return static_cast<int>(first / kV3MaskThreads) % MaskWordsPlace<true>{pairs_of(p.call)}.key_blocks() / kWords;
  }
  // Those of block `of`. Volatile: it stays where it is, ahead of the wait for the scores.
  __device__ __forceinline__ void read(const ForwardCall& p, int of) {
    const unsigned* const from =
        static_cast<const unsigned*>(pairs_of(p.call).tiles) + (first + static_cast<unsigned>(of) * (kWords * kV3MaskThreads));
#pragma unroll
    for (int i = 0; i < kWords; ++i) asm volatile("ld.global.u32 %0, [%1];" : "=r"(words[i]) : "l"(from + i * kV3MaskThreads) : "memory");
  }
  // Besides, what is behind the keys that the thread's two queries see: as many from its first key of the block on.
  __device__ __forceinline__ void hide_behind(int keys0, int keys1) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] &= ~(behind(keys0 - i * kV3MaskSide) | behind(keys1 - i * kV3MaskSide) << 2);
  }
  // All lanes of a warp together: most blocks of most masks hide all or nothing. Nothing of this may come before the scores are there, because who
  // waits for the words holds up the warpgroup whose turn is next: `zero`, which the compiler does not know, ties them to a score.
  __device__ __forceinline__ void hide(float (&s)[kBlockN / 2], unsigned zero) const {
    unsigned hidden = __float_as_uint(s[0]) & zero;
#pragma unroll
    for (const unsigned word : words) hidden |= ~word;
    if (ptx::vote_all(hidden == 0)) return;
#pragma unroll
    for (int i = 0; i < kBlockN / 2; ++i)
      if ((words[i / 32] & 1u << i % 32) == 0) s[i] = -kInfinity;
  }

 private:
  // The bits of one query's pairs, two in each four for two keys of each eight, that are not among its first keys.
  static __device__ __forceinline__ unsigned behind(int keys) {
    const int whole = max(keys, 0) / 8, more = max(keys, 0) % 8;
    const unsigned bits = more == 0 ? 0x33333333u : more == 1 ? 0x33333332u : 0x33333330u;
    return whole < 8 ? bits << 4 * whole : 0;
  }
};

}  // namespace fattn::v3
