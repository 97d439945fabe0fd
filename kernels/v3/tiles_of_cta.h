// Which tiles a CTA of the v3 forward pass computes: in turns, as all roles can tell by themselves (v3/schedule.h). Of packed sequences, whose
// lengths the host does not know, whoever is free takes the next. The thread that loads takes a tile's number two tiles before and looks its place up
// one tile before, and leaves it in shared memory before it asks for the queries of the tile in front: the others, who have waited for those, read it
// there. A place is written again four tiles further on, when nobody reads it any more: queries of a tile are loaded when those of two before (with
// one buffer, of one before) have given their buffer back. Its number is the loading thread's own.
//
// When CTAs came to take tiles, time over that of tiles in turns, to and fro (one H200, bf16, 4 sequences of 1024 to 4096 rows, nheads * headdim =
// 2048): headdim 64, 128 and 256 causal 0.91, 0.94, 0.98, without a mask 0.99, 0.97, 1.01. Batch entries with lengths, documents and masks gained
// nothing on the whole (0.91 to 1.05). Places in shared memory, instead of the list that all looked up in global memory: 32 sequences of 512 rows,
// causal, 0.70 (headdim 64) and 0.95 (128).
#pragma once

#include "kernels/ptx/shared_memory.h"
#include "kernels/v3/forward_shape.h"
#include "kernels/v3/schedule.h"
#include "kernels/v3/spoilt_notes.h"

namespace fattn::v3 {

// What is left there: a V3PackedTile (its row -1: there is no such tile), then its head and its number, which is written a tile earlier.
template <class Spec>
__device__ __forceinline__ unsigned tile_slot(unsigned shared, int nth) {
  return shared + static_cast<unsigned>(ForwardShape<Spec>::kOffsetTiles + nth % kV3TileSlots * kV3TileSlotBytes);
}
constexpr unsigned kNumberInSlot = 28;

// The number of the CTA's tile `nth`, of packed sequences its row; -1 after the last.
template <class Spec>
__device__ __forceinline__ int tile_number(const TileCall& p, unsigned shared, int nth) {
  if constexpr (kTakesTiles<Spec>) return static_cast<int>(ptx::ld_shared_4(tile_slot<Spec>(shared, nth)));
  int number = tile_in_turn<Spec>(p, nth);
  if constexpr (kTrustsValues<Spec>)
    if (number < 0 && nth > 0) [[unlikely]] {
      const int again = SpoiltNotes<Spec>{shared}.again_as(nth);
      if (again >= 0) number = tile_in_turn<Spec>(p, again);
    }
  return number;
}
// Where it is. `number`: tile_number().
template <class Spec>
__device__ __forceinline__ auto tile_place(const ForwardCall& p, unsigned shared, int nth, int number) {
  if constexpr (kTakesTiles<Spec>) {
    const unsigned slot = tile_slot<Spec>(shared, nth);
    const uint4 first = ptx::ld_shared_16(slot);
    const uint2 second = ptx::ld_shared_8(slot + 16);
    const auto of = [](unsigned x) { return static_cast<int>(x); };
    const int head = of(ptx::ld_shared_4(slot + 24));
    return PackedPlace{of(first.x), head, divide(head, p.work.by_group), of(first.z), of(second.x), {of(second.y), of(first.w)}, of(first.y)};
  } else {
    return dense_place_of<ForwardShape<Spec>::kBlockM>(p, number);
  }
}

__device__ __forceinline__ void fill_tile_slot(unsigned slot, const PackedTileOfHead& tile) {
  ptx::st_shared_16(slot, tile.first);
  ptx::st_shared_8(slot + 16, tile.second);
  ptx::st_shared_4(slot + 24, static_cast<unsigned>(tile.head));
}

// By the thread that loads, when it comes to tile `nth`: where the one behind it is, and which comes then.
template <class Spec>
__device__ __forceinline__ void take_next_tile(const ForwardCall& p, unsigned shared, int nth) {
  if constexpr (kTakesTiles<Spec>) {
    const int taken = atomicAdd(&static_cast<V3PackedTiles*>(pairs_of(p.call).tiles)->taken, 1);
    const unsigned slot = tile_slot<Spec>(shared, nth + 1);
    fill_tile_slot(slot, packed_tile(p, static_cast<int>(ptx::ld_shared_4(slot + kNumberInSlot))));
    ptx::st_shared_4(tile_slot<Spec>(shared, nth + 2) + kNumberInSlot, 2 * gridDim.x + static_cast<unsigned>(taken));
  }
}
// By the same before all others go on. The second turn is that of the first, from behind.
template <class Spec>
__device__ __forceinline__ void take_first_tiles(const ForwardCall& p, unsigned shared) {
  if constexpr (kTakesTiles<Spec>) {
    fill_tile_slot(tile_slot<Spec>(shared, 0), packed_tile(p, static_cast<int>(blockIdx.x)));
    ptx::st_shared_4(tile_slot<Spec>(shared, 1) + kNumberInSlot, 2 * gridDim.x - 1 - blockIdx.x);
  }
}

}  // namespace fattn::v3
