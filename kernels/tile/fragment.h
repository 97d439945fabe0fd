// Fragments of mma.m16n8k16 from swizzled tiles, and the matrix instruction of each level. Layouts of registers: kernels/ptx/mma.h.
#pragma once

#include "kernels/ptx/convert.h"
#include "kernels/ptx/ldmatrix.h"
#include "kernels/ptx/mma.h"
#include "kernels/tile/shared_tile.h"

namespace fattn::tile {

// Where a lane reads for 16 x 16 elements at (row, unit 0) of a tile. Other units: Tile::advance; 16 rows on: + 16 * Tile::kRowBytes.
//  row-major A, and B whose rows are the k dimension (read with .trans: V): matrices in the order (rows, units) 00 10 01 11
template <class Tile>
__device__ __forceinline__ unsigned fragment_address(unsigned tile, int row, int lane) {
  return tile + Tile::offset(row + lane % 16, lane / 16);
}
//  B whose rows are the n dimension (read without .trans: K): 00 01 10 11
template <class Tile>
__device__ __forceinline__ unsigned fragment_address_n(unsigned tile, int row, int lane) {
  return tile + Tile::offset(row + lane / 16 * 8 + lane % 8, lane / 8 % 2);
}

// d += a b for 16 x 16 by 16 x 8. Level 75 takes two steps of depth 8.
template <class Element, int kLevel>
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  if constexpr (kLevel < 80) {
    static_assert(is_same<Element, f16>, "matrix instructions for bf16 begin with sm_80");
    ptx::mma_m16n8k8_f16(d, a[0], a[1], b0);
    ptx::mma_m16n8k8_f16(d, a[2], a[3], b1);
  } else if constexpr (is_same<Element, bf16>) {
    ptx::mma_m16n8k16_bf16(d, a, b0, b1);
  } else {
    ptx::mma_m16n8k16_f16(d, a, b0, b1);
  }
}

}  // namespace fattn::tile
