// Inf and NaN in values of keys that some row does not see. Their weight is 0, but 0 * Inf is NaN. Two warps of the loader's warpgroup look through
// each block of values in which something may be hidden from a row of the tile, before consumers multiply with it, and put 0 in place of Inf and NaN:
// a hidden value then changes no bit of the result, and costs nothing. What rows may see is noted (v3/spoilt_notes.h) and added when the tile is done
// (v3/hidden_values.h). Values arrive blocks ahead of when they are wanted, so nobody waits for this.
#pragma once

#include "kernels/ptx/async_proxy.h"
#include "kernels/ptx/mbarrier.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/ptx/warp.h"
#include "kernels/v3/block_order.h"
#include "kernels/v3/forward_shape.h"
#include "kernels/v3/ring.h"
#include "kernels/v3/schedule.h"
#include "kernels/v3/spoilt_notes.h"
#include "kernels/v3/tiles_of_cta.h"

namespace fattn::v3 {

inline constexpr int kValueThreads = 32 * kV3NoteWarps;

template <class Spec, class Place>
__device__ __forceinline__ int last_row(const ForwardCall& p, const Place& place) {
  return min(place.row + ForwardShape<Spec>::kBlockM, keys_of<Spec>(p.call, place).queries(p.call)) - 1;
}

// Of a tile: blocks outside of [whole_begin, whole_end) may hide something from some of its rows.
struct TileValues {
  int nth, whole_begin, whole_end;

  template <class Spec, class Place>
  static __device__ __forceinline__ TileValues of(const ForwardCall& p, unsigned shared, const Place& place, int nth) {
    using Mask = typename Spec::Mask;
    constexpr int kBlockN = Spec::kBlockN;
    const auto keys = keys_of<Spec>(p.call, place);
    TileValues tile{nth, 0, 0};
    if constexpr (kTrustsValues<Spec>) {
      const SpoiltNotes<Spec> notes{shared};
      if (!notes.careful()) {
        tile.whole_end = 0x7fffffff;
      } else if (threadIdx.x % 32 == 0) {
        ptx::st_shared_4(notes.heads(nth) + threadIdx.x / 32 % kV3NoteWarps * 4, SpoiltNotes<Spec>::head(nth, 0));
      }
    } else {
      tile.whole_begin = (visible_begin<Mask>(p.call, keys, last_row<Spec>(p, place)) + kBlockN - 1) / kBlockN;
      tile.whole_end = Mask::visible_end(p.call, keys, place.row) / kBlockN;
    }
    if constexpr (kPairOf<Spec>.documents) {
#pragma unroll 1
      for (int group = 0; group < Spec::kGroups; ++group) {
        const auto own = keys_of<Spec>(p.call, place, group);
        tile.whole_begin = max(tile.whole_begin, own.one_begin);
        tile.whole_end = min(tile.whole_end, own.one_end);
      }
    }
    return tile;
  }
};

// The thread's part in it: block after block, in the order in which they are loaded.
template <class Spec>
struct ValueGuard {
  using Shape = ForwardShape<Spec>;
  using Element = typename Spec::Element;
  using Notes = SpoiltNotes<Spec>;
  static constexpr int kUnits = Shape::TileV::kBytes / (16 * kValueThreads);  // of 16 bytes, of a thread
  static_assert(kUnits * 16 * kValueThreads == Shape::TileV::kBytes);

  TightRing<Spec::kStagesV> v;

  // kValueThreads together, which are the last ones of the loader's warpgroup. The thread's number is found again each time, to keep a register free.
  static __device__ __forceinline__ int thread() { return ptx::opaque(static_cast<int>(threadIdx.x)) % kValueThreads; }
  // !kWaits: who has something else to do, and cannot come to the values of the stage's next block before consumers have waited for these, waits only
  // for values to look at; consumers wait for them, too.
  template <bool kWaits = true>
  __device__ __forceinline__ void look_at(const ForwardCall& p, unsigned shared, Barriers<Spec> barriers, const TileValues& tile, int block) {
    const bool looks = block < tile.whole_begin || block >= tile.whole_end;
    if (looks || kWaits) ptx::mbarrier_wait(barriers.v_full(v.stage()), v.parity());
    if (looks) {
      const unsigned at = shared + Shape::kOffsetV + v.stage() * Shape::TileV::kBytes + static_cast<unsigned>(thread()) * 16;
      if (any_nonfinite(at)) [[unlikely]] {
        write_down(p, shared, at, tile.nth, block);
        clear(at);
      }
    }
    ptx::warp_sync();
    if (thread() % 32 == 0) ptx::mbarrier_arrive(barriers.v_good(v.stage()));
    v.next();
  }

 private:
  // In the units of the warp, the thread's first being `at`: x * 0 is NaN then.
  static __device__ __forceinline__ bool any_nonfinite(unsigned at) {
    unsigned sum[2] = {0, 0};
#pragma unroll 2
    for (int i = 0; i < kUnits; ++i) {
      const uint4 x = ptx::ld_shared_16(at + i * (16 * kValueThreads));
      sum[0] = ptx::fma2<Element>(x.x, 0, sum[0]);
      sum[1] = ptx::fma2<Element>(x.y, 0, sum[1]);
      sum[0] = ptx::fma2<Element>(x.z, 0, sum[0]);
      sum[1] = ptx::fma2<Element>(x.w, 0, sum[1]);
    }
    return !ptx::vote_all(((sum[0] | sum[1]) & 0x7fff7fffu) == 0);
  }

  // Keys of the tile that some row sees are before it.
  static __device__ __forceinline__ int keys_end(const ForwardCall& p, unsigned shared, int nth) {
    const auto place = tile_place<Spec>(p, shared, nth, tile_number<Spec>(p, shared, nth));
    return Spec::Mask::visible_end(p.call, keys_of<Spec>(p.call, place), last_row<Spec>(p, place));
  }
  // Writes down where there is something that a row may see.
  static __device__ __forceinline__ void write_down(const ForwardCall& p, unsigned shared, unsigned at, int nth, int block) {
    // Windows and documents, which have no register for it, note what nobody sees, too: that costs little.
    const int behind = Spec::Mask::kBegins || kPairOf<Spec>.documents ? Spec::kBlockN : keys_end(p, shared, nth) - block * Spec::kBlockN;
    unsigned found = 0;    // of the block's steps a bit each, and from bit 8 on what kinds
    unsigned columns = 0;  // of the thread's eight in each 64 a bit each
#pragma unroll 1
    for (int i = 0; i < kUnits; ++i) {
      const int in_block = (i * (kValueThreads / 8) + thread() / 8) % Spec::kBlockN;
      if (in_block >= behind) continue;
      const uint4 x = ptx::ld_shared_16(at + i * (16 * kValueThreads));
      const unsigned words[4] = {x.x, x.y, x.z, x.w};
      unsigned own = 0, kinds = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const unsigned plus = nonfinite_halves<Element>(words[j], kPlus2<Element>), minus = nonfinite_halves<Element>(words[j], kMinus2<Element>);
        own |= ((plus | minus) >> 14 & 1 | (plus | minus) >> 29 & 2) << 2 * j;
        kinds |= (plus != 0 ? kSpoiltPlus << 8 : 0u) | (minus != 0 ? kSpoiltMinus << 8 : 0u);
      }
      columns |= own << i * (kValueThreads / 8) / Spec::kBlockN * 8;
      if (own != 0) found |= 1u << in_block / kStepKeys | kinds;
    }
#pragma unroll 1
    for (int lanes = 1; lanes < 32; lanes *= 2) found |= ptx::shfl_xor(found, lanes);
    if (found == 0) return;
    if (thread() % 32 == 0) note(Notes{shared}, ptx::opaque(nth), ptx::opaque(block), found);
    ptx::warp_sync();
    const int unit = (thread() ^ thread() / 8) % 8;  // in 64 columns
#pragma unroll 1
    for (unsigned to = Notes{shared}.columns(nth, thread() / 32) + static_cast<unsigned>(unit / 4 * 4); columns != 0; columns >>= 8, to += 8)
      ptx::or_shared(to, (columns & 0xff) << unit % 4 * 8);
  }
  static __device__ __forceinline__ void clear(unsigned at) {
#pragma unroll 2
    for (int i = 0; i < kUnits; ++i) {
      const uint4 x = ptx::ld_shared_16(at + i * (16 * kValueThreads));
      const auto finite = [](unsigned two) {  // NaN is what the others times 0 are; the bit is one of its exponent's
        return two & ~((ptx::fma2<Element>(two, 0, 0) >> 14 & 0x10001u) * 0xffffu);
      };
      ptx::st_shared_16(at + i * (16 * kValueThreads), uint4{finite(x.x), finite(x.y), finite(x.z), finite(x.w)});
    }
    ptx::async_proxy_fence();
  }
  // By one lane of each warp.
  static __device__ __forceinline__ void note(const Notes& notes, int nth, int block, unsigned found) {
    const int warp = thread() / 32;
    const unsigned head = notes.heads(nth) + static_cast<unsigned>(warp) * 4, bits = notes.bits(nth, warp), bit = Notes::first_bit(block);
    const unsigned kinds = Notes::kinds_in(ptx::ld_shared_4(head), nth);
    if (kinds == 0) {
#pragma unroll
      for (int i = 0; i < 2 * kV3NoteWords; i += 2) ptx::st_shared_8(bits + 4 * i, {0, 0});
    }
    const unsigned word = bits + bit / 32 * 4;
    ptx::st_shared_4(word, ptx::ld_shared_4(word) | (found & 0xff) << bit % 32);
    ptx::st_shared_4(head, Notes::head(nth, kinds | found >> 8));
  }
};

// The role of two warps that have nothing else to do; where they copy a bias, they do this beside it (v3/forward_terms.h).
template <class Spec>
__device__ __forceinline__ void guard_values(const ForwardCall& p, unsigned shared, Barriers<Spec> barriers) {
  using Mask = typename Spec::Mask;
  constexpr int kBlockM = ForwardShape<Spec>::kBlockM;
  ValueGuard<Spec> guard;
  for (int nth = 0;; ++nth) {
    const int number = tile_number<Spec>(p, shared, nth);
    if (number < 0) break;
    const auto place = tile_place<Spec>(p, shared, nth, number);
    const auto keys = keys_of<Spec>(p.call, place);
    const TileValues tile = TileValues::of<Spec>(p, shared, place, nth);
    int block = first_block<Spec, kBlockM>(p.call, keys, place.row);
    if constexpr (kFromDiagonal<Spec>) {
      for (; block >= 0; block = block_after<Spec, kBlockM>(p.call, keys, place.row, block)) guard.look_at(p, shared, barriers, tile, block);
    } else {
      const int first = block_begin<Mask, Spec::kBlockN>(p.call, keys, place.row);
      for (; block >= first; --block) guard.look_at(p, shared, barriers, tile, block);
    }
  }
}

}  // namespace fattn::v3
