// Copies rows of a matrix between global memory and a swizzled tile, by all threads of a CTA. Rows and columns beyond the matrix are zeros.
#pragma once

#include "kernels/ptx/async_copy.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/v2/swizzled_tile.h"

namespace fattn::v2 {

// kAligned: bases and strides are multiples of 16 bytes; otherwise element by element. kAsync: cp.async, else through registers.
template <int kThreads, int kWidth, int kHeaddim, bool kAligned, bool kAsync>
class RowLoader {
  using Tile = SwizzledTile<kWidth>;
  using Bits = unsigned short;
  static constexpr int kColumns = kWidth / 8;                // of 16 bytes
  static constexpr int kColumnLanes = kColumns & -kColumns;  // its largest power of two: neighbouring threads
  static constexpr int kRowStep = kThreads / kColumnLanes;
  static constexpr int kUnroll = kAligned && kAsync ? 64 : 1;  // copies through registers would take many if unrolled
  const int row_, column_;
  const unsigned offset_;

  // Calls visit(bytes from the tile's start, row, steps of kRowStep done, column) for this thread's share of kRows rows.
  template <int kRows, class Visit>
  __device__ __forceinline__ void for_each(Visit visit) const {
#pragma unroll kUnroll
    for (int i = 0; i < (kRows + kRowStep - 1) / kRowStep; ++i) {
      const int row = row_ + i * kRowStep;
      if (kRows % kRowStep != 0 && row >= kRows) return;
      // Eight rows further the permutation is the same again; groups of columns are permuted alike.
      const unsigned row_offset = kRowStep % 8 == 0 ? offset_ + static_cast<unsigned>(i * kRowStep * Tile::kPitch) : Tile::offset(row, column_);
#pragma unroll kUnroll
      for (int c = 0; c < kColumns / kColumnLanes; ++c)
        visit(row_offset + static_cast<unsigned>(c * kColumnLanes * 16), row, i, column_ + c * kColumnLanes);
    }
  }

 public:
  __device__ explicit RowLoader(int thread)
      : row_(thread / kColumnLanes), column_(thread % kColumnLanes), offset_(Tile::offset(thread / kColumnLanes, thread % kColumnLanes)) {}

  // `rows` of the tile's kRows exist; `matrix` is its first.
  template <int kRows>
  __device__ __forceinline__ void load(unsigned tile, const void* matrix, long long row_stride, int rows) const {
    const Bits* first = static_cast<const Bits*>(matrix) + row_ * row_stride;
    const long long step = row_stride * kRowStep;
    for_each<kRows>([&](unsigned offset, int row, int i, int column) {
      const Bits* from = first + i * step + column * 8;
      const bool inside = row < rows && (kHeaddim == kWidth || column * 8 < kHeaddim);
      if constexpr (kAligned && kAsync) {
        ptx::cp_async_16_zfill(tile + offset, from, inside ? 16 : 0);
      } else if constexpr (kAligned) {
        ptx::st_shared_16(tile + offset, inside ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0});
      } else {
#pragma unroll 1
        for (int e = 0; e < 8; e += 2) {
          const unsigned low = inside && column * 8 + e < kHeaddim ? from[e] : 0, high = inside && column * 8 + e + 1 < kHeaddim ? from[e + 1] : 0;
          ptx::st_shared_4(tile + offset + 2 * e, low | high << 16);
        }
      }
    });
  }

  template <int kRows>
  __device__ __forceinline__ void store(unsigned tile, void* matrix, long long row_stride, int rows) const {
    Bits* first = static_cast<Bits*>(matrix) + row_ * row_stride;
    const long long step = row_stride * kRowStep;
    for_each<kRows>([&](unsigned offset, int row, int i, int column) {
      if (row >= rows || column * 8 >= kHeaddim) return;
      Bits* to = first + i * step + column * 8;
      if constexpr (kAligned) {
        *reinterpret_cast<uint4*>(to) = ptx::ld_shared_16(tile + offset);
      } else {
#pragma unroll 1
        for (int e = 0; e < 8 && column * 8 + e < kHeaddim; e += 2) {
          const unsigned pair = ptx::ld_shared_4(tile + offset + 2 * e);
          to[e] = static_cast<Bits>(pair);
          if (column * 8 + e + 1 < kHeaddim) to[e + 1] = static_cast<Bits>(pair >> 16);
        }
      }
    });
  }
};

}  // namespace fattn::v2
