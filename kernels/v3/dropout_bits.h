// Dropout in v3's forward pass. Which weights stay follows from their place alone (shared/dropout.h), so the bits need not wait for scores: warps
// that have nothing else to do make them, some blocks ahead of the consumers, in a ring in shared memory beside those of keys and values.
//
// A unit is what a consumer warp needs of a block: each lane's own bits, in the order of core::dropout_bit(), a word for each block of random
// numbers.
#pragma once

#include "kernels/pair.h"
#include "kernels/ptx/mbarrier.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/ptx/warp.h"
#include "kernels/v3/block_order.h"
#include "kernels/v3/forward_shape.h"
#include "kernels/v3/philox.h"
#include "kernels/v3/ring.h"
#include "kernels/v3/schedule.h"
#include "shared/v3_forward_work.h"

namespace fattn::v3 {

template <int kBlockN>
struct DropoutUnit {
  static constexpr int kWords = kBlockN / core::kDropoutBlock;  // of a lane
  static constexpr int kBytes = 32 * 4 * kWords;
  static_assert(kBlockN == 64 || kBlockN == 128);

  static __device__ __forceinline__ void store(unsigned unit, int lane, const unsigned (&kept)[kWords]) {
    if constexpr (kWords == 1)
      ptx::st_shared_4(unit + static_cast<unsigned>(lane * 4), kept[0]);
    else
      ptx::st_shared_8(unit + static_cast<unsigned>(lane * 8), {kept[0], kept[1]});
  }
  static __device__ __forceinline__ void load(unsigned (&kept)[kWords], unsigned unit, int lane) {
    if constexpr (kWords == 1) {
      kept[0] = ptx::ld_shared_4(unit + static_cast<unsigned>(lane * 4));
    } else {
      const uint2 both = ptx::ld_shared_8(unit + static_cast<unsigned>(lane * 8));
      kept[0] = both.x;
      kept[1] = both.y;
    }
  }

  // Weights of a block as they are stored, the operand of wgmma: those that are dropped become 0.
  static __device__ __forceinline__ void drop(unsigned (&weights)[kBlockN / 16][4], const unsigned (&kept)[kWords]) {
#pragma unroll
    for (int i = 0; i < kBlockN / 4; ++i) weights[i / 4][i % 4] &= kept_halves(kept[i / 16], i % 2, i / 2 % 8);
  }
};

// Makes the bits of all blocks that the CTA's tiles meet: warp `nth_warp` of kWarps. All lanes of the warp together.
template <class Spec, int kWarps>
__device__ __forceinline__ void make_dropout_bits(const ForwardCall& p, unsigned shared, Barriers<Spec> barriers, int nth_warp) {
  using Shape = ForwardShape<Spec>;
  using Unit = DropoutUnit<Spec::kBlockN>;
  using Mask = typename Spec::Mask;
  constexpr int kUnits = 4 * Shape::kGroups;
  const PairParams& pairs = pairs_of(p.call);
  const int lane = static_cast<int>(threadIdx.x) % 32;

  Ring<kV3DropoutStages> ring;
  int unit = nth_warp;
#pragma unroll 1
  for (int nth = 0;; ++nth) {
    const int number = tile_number<Spec>(p, nth);
    if (number < 0) break;
    const auto place = place_of<Spec, Shape::kBlockM>(p, number);
    const HeadOfPhilox head(pairs.dropout_state[0], pairs.dropout_state[1] +
                                                        static_cast<unsigned long long>(place.entry()) * static_cast<unsigned>(p.call.nheads) +
                                                        static_cast<unsigned>(place.head));
    const auto keys = keys_of<Spec>(p.call, place);
    const int first = block_begin<Mask, Shape::kBlockN>(p.call, keys, place.row);
    int block = first_block<Spec, Shape::kBlockM>(p.call, keys, place.row);
    const unsigned first_number = 2 * core::dropout_query(static_cast<unsigned>(place.row + lane / 4));
#pragma unroll 1
    do {
#pragma unroll 1
      for (; unit < kUnits; unit += kWarps) {
        unsigned bits[Unit::kWords];
#pragma unroll
        for (int i = 0; i < Unit::kWords; ++i)
          bits[i] = head.kept(first_number + static_cast<unsigned>(unit * 16),
                              static_cast<unsigned>((block * Unit::kWords + i) * core::kDropoutCalls + lane % 4), pairs.dropout_below);
        ptx::mbarrier_wait(barriers.bits_empty(ring.stage), ring.parity ^ 1);
        Unit::store(shared + Shape::kOffsetBits + ring.stage * Shape::kBitBytes + static_cast<unsigned>(unit * Unit::kBytes), lane, bits);
        ptx::warp_sync();
        if (lane == 0) ptx::mbarrier_arrive(barriers.bits_full(ring.stage));
      }
      unit -= kUnits;
      ring.next();
    } while (kFromDiagonal<Spec> ? (block = block_after<Spec, Shape::kBlockM>(p.call, keys, place.row, block)) >= 0 : block-- > first);
  }
}

}  // namespace fattn::v3
