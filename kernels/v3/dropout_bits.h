// Dropout in v3's forward pass. Which weights stay follows from their place alone (device_abi/dropout.h), so consumers need not wait for scores to
// draw the random numbers: they do so while the tensor cores multiply, each lane for its own pairs.
#pragma once

#include "kernels/pair.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/v3/philox.h"

namespace fattn::v3 {

// Without dropout: nothing.
template <class Spec, bool kDropout>
struct DropoutBits {
  template <class Call, class Place>
  __device__ __forceinline__ void begin(const Call&, const Place&) {}
  __device__ __forceinline__ void draw(const AttentionParams&, int, int) {}
  template <class Weights>
  __device__ __forceinline__ void drop(Weights&) const {}
};

template <class Spec>
struct DropoutBits<Spec, true> {
  static constexpr int kWords = Spec::kBlockN / core::kDropoutBlock;  // of a lane, in the order of core::dropout_bit()
  static_assert(Spec::kBlockN % core::kDropoutBlock == 0);

  HeadOfPhilox head;  // of the tile
  unsigned kept[kWords];

  // Before the first block of a tile.
  template <class Call, class Place>
  __device__ __forceinline__ void begin(const Call& p, const Place& place) {
    const unsigned long long seed = pairs_of(p.call).dropout_state[0], offset = pairs_of(p.call).dropout_state[1];
    head = HeadOfPhilox(
        seed, offset + static_cast<unsigned long long>(place.entry()) * static_cast<unsigned>(p.call.nheads) + static_cast<unsigned>(place.head));
  }

  // Of the lane's pairs of block `block`; `row`: the warpgroup's first, a multiple of 64. Between the issue of a product and waiting for it. (To keep
  // ptxas from mixing the draw with the exponentials, by reading from shared memory what it begins with, made it slower or no faster: one H200, bf16,
  // seqlen 4096, over plain attention 1.46 and 1.46 at headdim 64, 1.29 and 1.36 at 128, causal 1.70 and 1.78, 1.29 and 1.33.)
  __device__ __forceinline__ void draw(const AttentionParams& call, int row, int block) {
    const unsigned thread = ptx::opaque(threadIdx.x) % 128;
    const DropoutPlace<kPairOf<Spec>> place(call);
    const unsigned query = static_cast<unsigned>(row) / 2 + thread / 4 + place.queries();  // core::dropout_query() of the lane's first row
    const unsigned first = static_cast<unsigned>(block * kWords) + place.blocks();
#pragma unroll
    for (unsigned i = 0; i < kWords; ++i)
      kept[i] = ptx::opaque(head.kept(query, (first + i) * core::kDropoutCalls + thread % 4, pairs_of(call).dropout_thresholds));
  }

  // Weights of the block as they are stored, the operand of wgmma: those that are dropped become 0.
  __device__ __forceinline__ void drop(unsigned (&weights)[Spec::kBlockN / 16][4]) const {
#pragma unroll
    for (int i = 0; i < Spec::kBlockN / 4; ++i) weights[i / 4][i % 4] &= kept_halves(kept[i / 16], i % 2, i / 2 % 8);
  }
};

}  // namespace fattn::v3
