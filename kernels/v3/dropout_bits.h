// Dropout in v3's forward pass. Which weights stay follows from their place alone (shared/dropout.h), so consumers need not wait for scores to draw
// the random numbers: they do so while the tensor cores multiply, each lane for its own pairs.
#pragma once

#include "kernels/pair.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/v3/philox.h"

namespace fattn::v3 {

// Without dropout: nothing.
template <class Spec, bool kDropout>
struct DropoutBits {
  template <class Call, class Place>
  __device__ __forceinline__ void begin(const Call&, const Place&, unsigned) {}
  __device__ __forceinline__ void draw(const AttentionParams&, unsigned, int, int) {}
  template <class Weights>
  __device__ __forceinline__ void drop(Weights&) const {}
};

template <class Spec>
struct DropoutBits<Spec, true> {
  static constexpr int kWords = Spec::kBlockN / core::kDropoutBlock;  // of a lane, in the order of core::dropout_bit()
  static_assert(Spec::kBlockN % core::kDropoutBlock == 0);

  // Whether draw() forces its place. Under a causal mask, where warps wait for each other less evenly, that costs more than it brings: one H200,
  // bf16, seqlen 4096, over plain attention: without a mask 1.65 and 1.60 -> 1.61 and 1.40 (headdim 64, 128), causal 1.80 and 1.43 -> 1.87 and 1.58.
  static constexpr bool kForced = !Spec::Mask::kCausal;

  HeadOfPhilox head;  // of the tile
  unsigned kept[kWords];

  // Before the first block of a tile. `memory`: of the CTA, kV3DropoutBytes.
  template <class Call, class Place>
  __device__ __forceinline__ void begin(const Call& p, const Place& place, unsigned memory) {
    const unsigned long long seed = pairs_of(p.call).dropout_state[0], offset = pairs_of(p.call).dropout_state[1];
    head = HeadOfPhilox(
        seed, offset + static_cast<unsigned long long>(place.entry()) * static_cast<unsigned>(p.call.nheads) + static_cast<unsigned>(place.head));
    if constexpr (kForced) ptx::st_shared_4(own_word(memory, ptx::opaque(threadIdx.x)), head.word0);  // all lanes the same
  }

  static __device__ __forceinline__ unsigned own_word(unsigned memory, unsigned thread) { return memory + thread / 32 * 4; }

  // Of the lane's pairs of block `block`; `row`: the warpgroup's first, a multiple of 64. Between the issue of a product and waiting for it, and if
  // forced that is not for ptxas to change: it would mix the draw with the exponentials, where every instruction costs time. What the draw begins
  // with is read from shared memory, after the issue, and what it ends with might be written there.
  __device__ __forceinline__ void draw(const AttentionParams& call, unsigned memory, int row, int block) {
    unsigned thread = ptx::opaque(threadIdx.x);
    const unsigned own = own_word(memory, thread);
    if constexpr (kForced) asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(head.word0) : "r"(own) : "memory");
    thread %= 128;
    const unsigned query = static_cast<unsigned>(row) / 2 + thread / 4;  // core::dropout_query() of the lane's first row
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      kept[i] = head.kept(query, static_cast<unsigned>((block * kWords + i) * core::kDropoutCalls) + thread % 4, pairs_of(call).dropout_thresholds);
#pragma unroll
    for (unsigned& word : kept) {
      if constexpr (!kForced)
        word = ptx::opaque(word);
      else
        asm volatile("{.reg .pred never; setp.eq.u32 never, %1, 0; @never st.volatile.shared.u32 [%1], %0;}" : "+r"(word) : "r"(own) : "memory");
    }
  }

  // Weights of the block as they are stored, the operand of wgmma: those that are dropped become 0.
  __device__ __forceinline__ void drop(unsigned (&weights)[Spec::kBlockN / 16][4]) const {
#pragma unroll
    for (int i = 0; i < Spec::kBlockN / 4; ++i) weights[i / 4][i % 4] &= kept_halves(kept[i / 16], i % 2, i / 2 % 8);
  }
};

}  // namespace fattn::v3
