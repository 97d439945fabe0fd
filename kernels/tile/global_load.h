// Copies of rows from global memory into a swizzled tile by all threads of a CTA, or of a team of it, with zeros for what lies outside.
#pragma once

#include "kernels/ptx/async_copy.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/tile/shared_tile.h"

namespace fattn::tile {

enum class CopyBy {
  kAsync,      // cp.async: completes at ptx::cp_async_wait
  kRegisters,  // 16-byte loads and stores, complete on return: before sm_80
  kElements    // as kRegisters, element by element: bases or strides that are no multiple of 16 bytes, any headdim
};

// Each thread copies the same units of every tile: it may look at or change them before the barrier that shows them to the others.
// kTeams: a CTA is that many teams of kThreads threads, each with tiles of its own.
template <class Tile, int kThreads, int kHeaddim, CopyBy kBy, int kTeams = 1>
struct TileCopy {
  static constexpr int kUnitsInAll = Tile::kRows * Tile::kUnits;
  static constexpr int kPasses = (kUnitsInAll + kThreads - 1) / kThreads;
  static constexpr bool kWholePasses = kUnitsInAll % kThreads == 0;
  static constexpr bool kSameUnit = kThreads % Tile::kUnits == 0;  // a thread stays in its column of units
  static constexpr bool kPadded = kHeaddim != Tile::kWidth;
  // Loads that go through registers are few at a time: matrix operands fill the registers already.
  static constexpr int kUnroll = kBy == CopyBy::kAsync ? kPasses : kBy == CopyBy::kRegisters ? 4 : 1;

  // body(row, unit, first) for each unit of this thread.
  template <int kUnrolled = kUnroll, class Body>
  static __device__ __forceinline__ void for_each_unit(Body&& body) {
    const int in_cta = ptx::opaque(static_cast<int>(threadIdx.x)), thread = kTeams == 1 ? in_cta : in_cta % kThreads;
#pragma unroll(kUnrolled)
    for (int pass = 0; pass < kPasses; ++pass) {
      const int index = thread + pass * kThreads;
      const int row = kSameUnit ? thread / Tile::kUnits + pass * (kThreads / Tile::kUnits) : index / Tile::kUnits;
      const int unit = kSameUnit ? thread % Tile::kUnits : index % Tile::kUnits;
      if (kWholePasses || index < kUnitsInAll) body(row, unit, pass == 0);
    }
  }

  // Rows [0, rows) of `source` into the tile; kBounded: that may be less than Tile::kRows.
  template <bool kBounded>
  static __device__ __forceinline__ void copy(unsigned tile, const unsigned short* source, long long row_stride, int rows) {
    const unsigned short* next = nullptr;  // the thread's next unit, where it stays in its column
    for_each_unit([&](int row, int unit, bool first) {
      const unsigned short* from = kSameUnit && !first ? next : source + row * row_stride + unit * 8;
      next = from + kThreads / Tile::kUnits * row_stride;
      copy_unit<kBounded>(tile, row, unit, from, !kBounded || row < rows);
    });
  }

  // The same of rows that lie anywhere: row_at(row) is where row `row` begins, or null, of which zeros are written. It is asked for rows below `rows`
  // alone.
  template <bool kBounded, bool kMayBeNull = false, class RowAt>
  static __device__ __forceinline__ void copy_rows(unsigned tile, int rows, RowAt&& row_at) {
    // Few at a time: their addresses are looked up first, and take registers.
    constexpr int kAtOnce = Tile::kWidth > 128 ? 2 : 4;
    for_each_unit<(kUnroll < kAtOnce ? kUnroll : kAtOnce)>([&](int row, int unit, bool) {
      const unsigned short* const at = row_at(kBounded ? min(row, rows - 1) : row);
      copy_unit<kBounded || kMayBeNull>(tile, row, unit, at + unit * 8, (!kBounded || row < rows) && (!kMayBeNull || at != nullptr));
    });
  }

  // One unit of a row, which is at `from`; of a row that does not exist zeros. kMayLack: it may not.
  template <bool kMayLack>
  static __device__ __forceinline__ void copy_unit(unsigned tile, int row, int unit, const unsigned short* from, bool exists) {
    const bool inside = (!kMayLack || exists) && (!kPadded || unit * 8 < kHeaddim);
    const unsigned to = tile + Tile::offset(row, unit);
    if constexpr (kBy == CopyBy::kAsync) {
      if constexpr (kMayLack || kPadded)
        ptx::cp_async_16_zfill(to, from, inside ? 16 : 0);
      else
        ptx::cp_async_16(to, from);
    } else if constexpr (kBy == CopyBy::kRegisters) {
      ptx::st_shared_16(to, inside ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0});
    } else {
      unsigned word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = unit * 8 + 2 * i;
        const unsigned low = inside && column < kHeaddim ? from[2 * i] : 0u;
        const unsigned high = inside && column + 1 < kHeaddim ? from[2 * i + 1] : 0u;
        word[i] = low | high << 16;
      }
      ptx::st_shared_16(to, uint4{word[0], word[1], word[2], word[3]});
    }
  }

  static __device__ __forceinline__ void commit() {
    if constexpr (kBy == CopyBy::kAsync) ptx::cp_async_commit();
  }
  template <int kPending>
  static __device__ __forceinline__ void wait() {
    if constexpr (kBy == CopyBy::kAsync) ptx::cp_async_wait<kPending>();
  }
};

}  // namespace fattn::tile
