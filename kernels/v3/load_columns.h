// Loads of operand tiles by TMA.
#pragma once

#include "kernels/ptx/tensor_copy.h"

namespace fattn::v3 {

// The columns of the tile at `tile`, an OperandTile, from `at` on. The barrier expects Tile::kBytes, as its caller has told it.
template <class Tile>
__device__ __forceinline__ void load_columns(unsigned tile, const TensorMap& map, unsigned barrier, ptx::TensorPlace at) {
  for (int column = 0; column < Tile::kColumns; ++column) {
    ptx::tensor_load(tile + column * Tile::kColumnBytes, &map, barrier, at);
    at.column += 64;
  }
}

}  // namespace fattn::v3
