// Writes 16 x 16 blocks held as A fragments of mma into a swizzled tile, each row of a fragment becoming a row of the tile.
#pragma once

#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/stmatrix.h"
#include "kernels/v2/swizzled_tile.h"

namespace fattn::v2 {

// Rows from `first_row`, kSpan columns from `first` on (a multiple of kSpan, which is a power of two).
template <int kWidth, int kSpan>
class FragmentStore {
#if __CUDA_ARCH__ >= 900
  BlockAddress<kWidth, kSpan, LaneOrder::kColumnMajor> address_;

 public:
  __device__ FragmentStore(int lane, int first_row, int first) : address_(lane, first_row, first) {}

  __device__ void store(unsigned tile, int row, int block, const unsigned (&a)[4]) const { ptx::stmatrix_x4(address_.at(tile, row, block), a); }
#else
  using Tile = SwizzledTile<kWidth>;
  int row_, column_;
  unsigned word_;

 public:
  __device__ FragmentStore(int lane, int first_row, int first) : row_(first_row + lane / 4), column_(first / 8), word_(lane % 4 * 4) {}

  __device__ void store(unsigned tile, int row, int block, const unsigned (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::st_shared_4(tile + Tile::offset(row_ + row + i % 2 * 8, column_ + 2 * block + i / 2) + word_, a[i]);
  }
#endif
};

}  // namespace fattn::v2
