// A tile of 16-bit elements in shared memory, swizzled so that ldmatrix and rows of 16-byte stores meet no bank twice.
#pragma once

namespace fattn::tile {

// kRows rows of kWidth elements, row after row. A row is divided into units of 16 bytes; unit u of row r is kept at place u ^ swizzle(r).
// Eight consecutive rows of one unit then lie in eight different groups of four banks. The tile is aligned to 1024 bytes.
template <int kRows_, int kWidth_>
struct SharedTile {
  static constexpr int kRows = kRows_, kWidth = kWidth_;
  static constexpr int kUnits = kWidth / 8;
  static constexpr int kRowBytes = kWidth * 2;
  static constexpr int kBytes = kRows * kRowBytes;
  // Rows of a multiple of 128 bytes all begin at bank 0 and need eight places; those of 64 bytes more begin at bank 0 and 16 in turn and need four.
  static constexpr int kPlaces = kWidth % 64 == 0 ? 8 : 4;
  static_assert(kWidth % 32 == 0 && kBytes % 1024 == 0);

  static __device__ __forceinline__ int swizzle(int row) { return kPlaces == 8 ? row & 7 : (row >> 1) & 3; }
  static __device__ __forceinline__ unsigned offset(int row, int unit) {
    return static_cast<unsigned>(row * kRowBytes + ((unit ^ swizzle(row)) * 16));
  }
  // The address of unit u + kStep from that of unit u, for u < 2 and an even kStep.
  template <int kStep>
  static __device__ __forceinline__ unsigned advance(unsigned address) {
    static_assert(kStep % 2 == 0);
    return (address ^ (kStep % kPlaces * 16)) + kStep / kPlaces * (kPlaces * 16);
  }
};

constexpr __host__ __device__ int round_up(int x, int to) { return (x + to - 1) / to * to; }

}  // namespace fattn::tile
