// A matrix of 16-bit elements in shared memory whose 16-byte columns are permuted row by row, so that eight neighbouring rows of one column
// lie in different banks: ldmatrix, with or without .trans, and fragment stores meet no conflict.
#pragma once

namespace fattn::v2 {

template <int kWidth>  // elements of a row, a multiple of 16
struct SwizzledTile {
  static constexpr int kPitch = 2 * kWidth;  // bytes of a row
  // 16-byte columns are permuted inside groups of 2^kBits: the group is the largest that divides a row, 128 bytes being all banks.
  static constexpr int kBits = kPitch % 128 == 0 ? 3 : kPitch % 64 == 0 ? 2 : 1;
  static constexpr unsigned kGroupMask = (1u << kBits) - 1;

  // The same for rows that differ by a multiple of 8.
  __device__ static unsigned permutation(int row) { return (static_cast<unsigned>(row) >> (3 - kBits)) & kGroupMask; }

  // Bytes from the tile's start; `column` in units of 8 elements. Tiles start at multiples of 128 bytes.
  __device__ static unsigned offset(int row, int column) {
    return static_cast<unsigned>(row * kPitch) + ((static_cast<unsigned>(column) ^ permutation(row)) << 4);
  }
};

// The two ways in which the lanes of a warp address a 16 x 16 block: four 8 x 8 matrices in column-major or in row-major order.
//   kColumnMajor: A as stored; B (k x n) stored row by row, with .trans
//   kRowMajor:    B stored as n x k; A (m x k) stored as k x m, with .trans
enum class LaneOrder { kColumnMajor, kRowMajor };

// A warp's addresses of 16 x 16 blocks in kSpan columns of a tile, from column `first` on (a multiple of kSpan).
template <int kWidth, int kSpan, LaneOrder kOrder>
class BlockAddress {
  using Tile = SwizzledTile<kWidth>;
  static constexpr int kGroup = 8 << Tile::kBits;  // columns that are permuted among themselves
  static constexpr int kBlocks = kSpan / 16, kGroupBlocks = kGroup / 16;
  // Without carries a block's columns can be put in by exclusive or, as a constant; otherwise each block has its own register.
  static constexpr bool kByXor = kSpan == kWidth || (kSpan & (kSpan - 1)) == 0;
  unsigned row_;                           // bytes to this lane's row, and to the group of columns
  unsigned column_[kByXor ? 1 : kBlocks];  // bytes in the group; the same for many operands, so that the compiler keeps few of them

 public:
  __device__ BlockAddress(int lane, int first_row, int first) {
    const int row = kOrder == LaneOrder::kColumnMajor ? lane % 16 : lane % 8 + lane / 16 * 8;
    const int column = kOrder == LaneOrder::kColumnMajor ? lane / 16 : lane / 8 % 2;
    row_ = static_cast<unsigned>((first_row + row) * Tile::kPitch);
    if constexpr (kSpan % kGroup == 0) {
      row_ += static_cast<unsigned>(first * 2);
      column_[0] = Tile::offset(row, column) - static_cast<unsigned>(row * Tile::kPitch);
    } else if constexpr (kByXor) {
      row_ += static_cast<unsigned>(first / kGroup * kGroup * 2);
      column_[0] = Tile::offset(row, first % kGroup / 8 + column) - static_cast<unsigned>(row * Tile::kPitch);
    } else {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) column_[i] = Tile::offset(row, first / 8 + 2 * i + column) - static_cast<unsigned>(row * Tile::kPitch);
    }
  }

  // `row`, a multiple of 8, and `block`, the 16 columns, are constants of unrolled loops.
  __device__ unsigned at(unsigned tile, int row, int block) const {
    const unsigned from = tile + row_ + static_cast<unsigned>(row * Tile::kPitch);
    if constexpr (kByXor) {
      return from + (column_[0] ^ (static_cast<unsigned>(block % kGroupBlocks) << 5)) + static_cast<unsigned>(block / kGroupBlocks * kGroup * 2);
    } else {
      return from + column_[block];
    }
  }
};

}  // namespace fattn::v2
