// A mask of pairs and a bias in the v3 backward kernel: each thread reads what belongs to its own pairs of a block while products before it are under
// way. Of a mask that is a word (v3/mask_words.h).
#pragma once

#include "kernels/ptx/warp.h"
#include "kernels/v3/backward_fragments.h"
#include "kernels/v3/backward_schedule.h"
#include "kernels/v3/backward_shape.h"
#include "kernels/v3/mask_words.h"

namespace fattn::v3 {

// Without terms: nothing.
template <class Spec, bool kMask>
struct MaskWord {
  __device__ __forceinline__ void read(const BackwardCall&, TilePlace, int, int, int) {}
  template <class Visit>
  __device__ __forceinline__ void for_each_hidden(Visit) const {}
  __device__ __forceinline__ void hide(float (&)[32]) const {}
};

template <class Spec>
struct MaskWord<Spec, true> {
  unsigned word;

  // Of the block of queries from `row` on and the 64 keys from `key` on. Volatile: it stays where it is, ahead of the wait for the scores.
  __device__ __forceinline__ void read(const BackwardCall& p, TilePlace tile, int head, int row, int key) {
    const MaskWordsPlace<false> place{pairs_of(p.call)};
    const unsigned* const from = place.words(tile.batch(), head, row, min(key, p.call.seqlen_k - 1)) + ptx::opaque(threadIdx.x) % 128;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
  }
  // As hide() and for_each_hidden() of v3/backward_fragments.h.
  template <class Visit>
  __device__ __forceinline__ void for_each_hidden(Visit visit) const {
    if (ptx::vote_all(word == 0xffffffffu)) return;
#pragma unroll
    for (int i = 0; i < 32; ++i)
      if ((word & 1u << i) == 0) visit(i);
  }
  __device__ __forceinline__ void hide(float (&x)[32]) const {
    for_each_hidden([&](int i) { x[i] = 0; });
  }
};

}  // namespace fattn::v3
