// What a CTA of the v3 backward kernel knows of Inf, NaN and huge numbers in what it multiplies. A hidden pair has weight 0, and 0 * Inf is NaN:
// a tile that meets some is computed by code of its own, from the first block's dS on. It puts dS of hidden pairs to 0, and its products go
// v3/backward_careful.h's way. Nothing else is different: dk and dv have the bits that finite numbers in hidden places give.
//
// The first kernel looks at q and dout and leaves flags for each block of queries; k and v of a tile are looked at by the warpgroup of dq, which has
// nothing to do before the first dS is there. It tells the others in a word of shared memory.
#pragma once

#include "kernels/pair.h"
#include "kernels/ptx/barrier.h"
#include "kernels/ptx/dependent_launch.h"
#include "kernels/ptx/math.h"
#include "kernels/ptx/mbarrier.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/warp.h"
#include "kernels/v3/backward_fragments.h"
#include "kernels/v3/backward_schedule.h"
#include "kernels/v3/backward_shape.h"

namespace fattn::v3 {

// Flags of a block of queries, V3BackwardWork::nonfinite: Inf or NaN in q, in dout; and whether dP or row sums may have some.
inline constexpr int kQueriesNonfinite = 1, kDoutNonfinite = 2, kDpNonfinite = 4;

// 0x7fff in the halves that are Inf or NaN, 0 in the others: x * 0 + 0.
template <class Element>
__device__ __forceinline__ unsigned nonfinite_halves(unsigned pair) {
  return ptx::fma2<Element>(pair, 0, 0);
}
// Whether a product of two such numbers, or a sum of them, may be beyond fp32: bits 15 and 31. bf16 from 2^59 on, fp16 Inf and NaN.
template <class Element>
__device__ __forceinline__ unsigned huge_halves(unsigned pair) {
  constexpr unsigned kFirst = is_same<Element, bf16> ? 0x5d00u : 0x7c00u;
  return ((pair & 0x7fff7fffu) + (0x8000u - kFirst) * 0x10001u) & 0x80008000u;
}

template <class Spec>
struct Watch {
  using Shape = BackwardShape<Spec>;
  using Mask = typename Spec::Mask;
  using Element = typename Spec::Element;
  static constexpr bool kWatches = Mask::kUneven;  // or there are no hidden pairs
  static constexpr unsigned kKnown = 1, kCareful = 2, kSelects = 4, kBadKeys = 8;
  static constexpr unsigned kPlace = Shape::kPacked || Shape::kDocuments ? 4 * 19 : 4 * 7;  // behind what TilePlace has
  static constexpr int kBarrier = 1;                                                        // named, of the warpgroup of dq

  TilePlace tile;

  __device__ __forceinline__ unsigned word() const { return ptx::ld_shared_volatile_4(tile.address + kPlace); }
  // By one thread, before the CTA's threads meet.
  __device__ __forceinline__ void init() const { ptx::st_shared_4(tile.address + kPlace, 0); }
  // Whether `bit` is set, when all is known.
  __device__ __forceinline__ bool has(unsigned bit) const {
    unsigned x = word();
    while (!ptx::vote_all((x & kKnown) != 0)) x = word();
    return ptx::vote_all((x & bit) != 0);
  }
  // Whether some block of queries has Inf or NaN in q or dout.
  __device__ __forceinline__ bool queries_careful() const { return has(kCareful); }
  // Calls careful() if dS of hidden pairs has to be put to 0, which makes a tile one of those; else plain().
  template <class Careful, class Plain>
  __device__ __forceinline__ void choose(const Careful& careful, const Plain& plain) const {
    if constexpr (kWatches) {
      if (has(kSelects)) return careful();
    }
    plain();
  }

  // The flags of block `index` of the tile, of query head `head` of its group.
  __device__ __forceinline__ int block_flags(const BackwardCall& p, int head, int block) const {
    return p.work.nonfinite[tile.template first_block<Shape::kPacked, false>(p) + head * p.work.row_blocks + block];
  }
  // By warps of the warpgroup of dq: sets `bit` unless all of the warp is `well`. The barrier after it counts nothing: with bar.red ptxas spilled 160
  // bytes of this warpgroup's registers.
  __device__ __forceinline__ void note(bool well, unsigned bit) const {
    if (!ptx::vote_all(well) && own_lane() == 0) ptx::red_or_shared(tile.address + kPlace, bit);
  }

  // By the warpgroup of dq. Returns whether k has Inf or NaN.
  __device__ __forceinline__ bool look(const BackwardCall& p, unsigned shared, BackwardBarriers<Spec> barriers, int thread) const {
    ptx::wait_for_kernel_before();
    const int blocks = tile.blocks(), all = blocks * p.call.group;
    const auto flags_of = [&](int i) {
      if (i >= all) return 0;
      const int head = p.call.group == 1 ? 0 : i / blocks;
      return block_flags(p, head, i - head * blocks);
    };
    int flags = flags_of(thread);  // on their way while keys and values are looked at
    unsigned huge = 0, nonfinite = 0;
    const auto look_at = [&](unsigned from, int bytes, auto visit) {
#pragma unroll 4
      for (int at = 16 * thread; at < bytes; at += 16 * 128) {
        const uint4 x = ptx::ld_shared_16(from + static_cast<unsigned>(at));
        for (const unsigned pair : {x.x, x.y, x.z, x.w}) visit(pair);
      }
    };
    ptx::mbarrier_wait(barriers.k_full(), 0);
    look_at(shared, Shape::TileK::kBytes, [&](unsigned pair) {
      nonfinite = ptx::fma2<Element>(pair, 0, nonfinite);
      if constexpr (Shape::kBias != 0) huge |= huge_halves<Element>(pair);
    });
    ptx::mbarrier_wait(barriers.v_full(), 0);
    look_at(shared + Shape::kOffsetV, Shape::TileV::kBytes, [&](unsigned pair) { huge |= huge_halves<Element>(pair); });
    for (int first = 128; first < ptx::uniform(all); first += 128) flags |= flags_of(first + thread);
    ptx::warp_sync();
    note((huge | nonfinite) == 0 && flags == 0, kSelects);
    note((flags & (kQueriesNonfinite | kDoutNonfinite)) == 0, kCareful);
    note(nonfinite == 0, kBadKeys);
    ptx::warp_sync();
    ptx::bar_sync(kBarrier, 128);
    if (thread == 0) ptx::red_or_shared(tile.address + kPlace, kKnown);
    return ptx::vote_all((word() & kBadKeys) != 0);
  }
};

}  // namespace fattn::v3
