// What the warps that look through values (v3/forward_values.h) tell consumers of a tile (v3/hidden_values.h): of which 16 keys they put 0 in place
// of Inf and NaN that a row may see. Each of the warps has a word with the tile's number and what there was, and bits of 16 keys of a block, and of
// columns. Blocks share bits with others far away: one that is set without need costs time only. Notes of a tile that had nothing of the kind are not
// written, so the number says whose they are. They are written again kV3NoteTiles tiles further on: nobody is as far ahead as that, because there are
// fewer stages.
//
// With kTrustsValues nothing is looked through at first. A consumer with NaN in o leaves word of the tile, and from then on tiles are looked through.
// When the CTA has come to the end of its tiles, those that were not are computed again: all roles go on with them as if they were further ones.
#pragma once

#include "kernels/ptx/math.h"
#include "kernels/ptx/mbarrier.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/v3/forward_shape.h"

namespace fattn::v3 {

// In each half of the result kNonfiniteBits if x is NaN there or Inf of the sign, else 0. As bf16, in which the bits are a power of two from 4 on, it
// counts them in products with 1. `sign`: two times 1 or -1 of the type.
inline constexpr unsigned kNonfiniteBits = 0x4400;  // which are among those of either type's exponent
template <class Element>
inline constexpr unsigned kPlus2 = is_same<Element, bf16> ? 0x3f803f80u : 0x3c003c00u;
template <class Element>
inline constexpr unsigned kMinus2 = kPlus2<Element> | 0x80008000u;
template <class Element>
__device__ __forceinline__ unsigned nonfinite_halves(unsigned x, unsigned sign) {
  return ptx::fma2<Element>(ptx::mul_relu2<Element>(x, sign), 0, 0) & (kNonfiniteBits * 0x10001u);
}

inline constexpr int kStepKeys = 16;
enum : unsigned { kSpoiltPlus = 1, kSpoiltMinus = 2 };  // there is Inf of that sign, or NaN

template <class Spec>
struct SpoiltNotes {
  static constexpr int kSteps = Spec::kBlockN / kStepKeys, kBitsOfBlock = kSteps <= 2 ? 2 : kSteps <= 4 ? 4 : 8;
  static constexpr int kBlocks = 32 * kV3NoteWords / kBitsOfBlock;
  static_assert(kSteps <= 8 && Spec::kStagesV + 1 < kV3NoteTiles);
  unsigned shared;

  __device__ __forceinline__ unsigned heads(int nth) const {
    return shared + ForwardShape<Spec>::kOffsetNotes + static_cast<unsigned>(nth) % kV3NoteTiles * (4 * kV3NoteWarps);
  }
  __device__ __forceinline__ unsigned bits(int nth, int warp) const {
    constexpr unsigned kHeads = kV3NoteTiles * kV3NoteWarps * 4;
    return shared + ForwardShape<Spec>::kOffsetNotes + kHeads +
           (static_cast<unsigned>(nth) % kV3NoteTiles * kV3NoteWarps + static_cast<unsigned>(warp)) * (8 * kV3NoteWords);
  }
  __device__ __forceinline__ unsigned columns(int nth, int warp) const { return bits(nth, warp) + 4 * kV3NoteWords; }
  // With kTrustsValues: a barrier at which consumers say that all tiles are done, how many there were, and the first and last to be computed again.
  __device__ __forceinline__ unsigned done() const { return shared + ForwardShape<Spec>::kEndNotes - 24; }
  __device__ __forceinline__ unsigned tiles() const { return done() + 8; }
  __device__ __forceinline__ unsigned again() const { return done() + 16; }

  // By one thread, before Barriers::init(): there are none.
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < kV3NoteTiles; ++i) ptx::st_shared_8(heads(i), {0, 0});
    if constexpr (kTrustsValues<Spec>) {
      ptx::mbarrier_init(done(), 4 * Spec::kGroups);
      ptx::st_shared_8(again(), {0x7fffffffu, 0});
    }
  }
  // Whether values are looked through by now.
  __device__ __forceinline__ bool careful() const { return ptx::ld_shared_4(again()) != 0x7fffffffu; }
  // Whether those of a tile were, as long as its notes are there.
  __device__ __forceinline__ bool looked_through(int nth) const { return ptx::ld_shared_4(heads(nth)) >> 2 == static_cast<unsigned>(nth) + 1; }
  __device__ __forceinline__ void compute_again(int nth) const {
    ptx::min_shared(again(), nth);
    ptx::max_shared(again() + 4, nth);
  }
  // By one lane of each consumer warp, after the last of `count` tiles.
  __device__ __forceinline__ void all_done(int count) const {
    ptx::st_shared_4(tiles(), static_cast<unsigned>(count));
    ptx::mbarrier_arrive(done());
  }
  // Which tile the one behind the last is, and so on; -1 after the last of them.
  __device__ __forceinline__ int again_as(int nth) const {
    ptx::mbarrier_wait(done(), 0);
    const uint2 ends = ptx::ld_shared_8(again());
    const int further = nth - static_cast<int>(ptx::ld_shared_4(tiles()));
    return ends.x == 0x7fffffffu || further > static_cast<int>(ends.y - ends.x) ? -1 : static_cast<int>(ends.x) + further;
  }
  static __device__ __forceinline__ unsigned head(int nth, unsigned kinds) { return (static_cast<unsigned>(nth) + 1) << 2 | kinds; }
  static __device__ __forceinline__ unsigned kinds_in(unsigned head, int nth) { return head >> 2 == static_cast<unsigned>(nth) + 1 ? head & 3 : 0; }
  // Of block `block` in the bits of a tile: the first one's word and place there.
  static __device__ __forceinline__ unsigned first_bit(int block) { return static_cast<unsigned>(block) % kBlocks * kBitsOfBlock; }

  // Kinds of Inf and NaN that there were in a tile; 0 if there is no note.
  __device__ __forceinline__ unsigned kinds(int nth) const {
    const uint2 of_warps = ptx::ld_shared_8(heads(nth));
    return kinds_in(of_warps.x, nth) | kinds_in(of_warps.y, nth);
  }
  // Bit i: whether there is something in the keys from kStepKeys * i on of block `block`. In a tile with a note.
  __device__ __forceinline__ unsigned steps(int nth, int block) const {
    const uint2 of_warps = ptx::ld_shared_8(heads(nth));
    const unsigned bit = first_bit(block), word = bit / 32 * 4;
    unsigned found = 0;
    if (kinds_in(of_warps.x, nth) != 0) found = ptx::ld_shared_4(bits(nth, 0) + word);
    if (kinds_in(of_warps.y, nth) != 0) found |= ptx::ld_shared_4(bits(nth, 1) + word);
    return found >> bit % 32 & ((1u << kSteps) - 1);
  }
  // Bit i: whether there is something in column 32 * word + i.
  __device__ __forceinline__ unsigned spoilt_columns(int nth, int word) const {
    const uint2 of_warps = ptx::ld_shared_8(heads(nth));
    unsigned found = 0;
    if (kinds_in(of_warps.x, nth) != 0) found = ptx::ld_shared_4(columns(nth, 0) + 4 * word);
    if (kinds_in(of_warps.y, nth) != 0) found |= ptx::ld_shared_4(columns(nth, 1) + 4 * word);
    return found;
  }
};

}  // namespace fattn::v3
