// fp32 rows in shared memory as operands of bf16 matrix instructions: every number is the sum of three bf16, exactly from 2^-110 on, below to 2^-134.
//
// bf16 has the range of fp32, so no factor is needed that would follow from the other numbers of a tile (tile/split_tile.h): the parts of a number
// are its own. A product of two numbers is six of their parts; those that are left out are some 2^-23 of it. The first part is cut off, so that it is
// finite where the number is; the others are rounded to nearest. Of Inf and NaN some part is NaN, or Inf and another NaN: so is all that they are
// multiplied with.
#pragma once

#include "kernels/ptx/convert.h"
#include "kernels/ptx/mma.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/tile/split_tile.h"

namespace fattn::tile {

// Three pairs of bf16 from two numbers.
__device__ __forceinline__ void three_parts(float x, float y, unsigned (&part)[3]) {
  part[0] = __byte_perm(__float_as_uint(x), __float_as_uint(y), 0x7632);
#pragma unroll
  for (int i = 1; i < 3; ++i) {
    x -= ptx::low_float<bf16>(part[i - 1]);
    y -= ptx::high_float<bf16>(part[i - 1]);
    part[i] = ptx::cvt_bf16x2(x, y);
  }
}

// A tile takes three Tiles. Numbers are copied to where the first two will be, as SplitCopy does it.
template <class Tile, int kThreads, int kHeaddim, bool kAligned>
struct ThreePartCopy : SplitCopy<Tile, kThreads, kHeaddim, kAligned> {
  using Copy = SplitCopy<Tile, kThreads, kHeaddim, kAligned>;

  // Makes parts of this thread's numbers, times `sign`.
  static __device__ __forceinline__ void split(unsigned tile, float sign) {
    Copy::template for_each_unit<2>([&](unsigned offset, int, int) {
      split_unit(tile + offset, ptx::ld_shared_16(tile + offset), ptx::ld_shared_16(tile + Tile::kBytes + offset), sign);
    });
  }
  // The same with 0 in place of what is not finite; then it calls note().
  template <class Note>
  static __device__ __forceinline__ void split_finite(unsigned tile, Note&& note) {
    Copy::template for_each_unit<2>([&](unsigned offset, int, int) {
      uint4 a = ptx::ld_shared_16(tile + offset), b = ptx::ld_shared_16(tile + Tile::kBytes + offset);
      greatest_cleaned<NonfiniteCleaned>(a, b, note);
      split_unit(tile + offset, a, b, 1.0f);
    });
  }

 private:
  static __device__ __forceinline__ void split_unit(unsigned to, uint4 a, uint4 b, float sign) {
    const auto number = [&](unsigned bits) { return __uint_as_float(bits) * sign; };
    unsigned part[4][3];
    three_parts(number(a.x), number(a.y), part[0]);
    three_parts(number(a.z), number(a.w), part[1]);
    three_parts(number(b.x), number(b.y), part[2]);
    three_parts(number(b.z), number(b.w), part[3]);
#pragma unroll
    for (int i = 0; i < 3; ++i) ptx::st_shared_16(to + i * Tile::kBytes, uint4{part[0][i], part[1][i], part[2][i], part[3][i]});
  }
};

// rest += a b but for the product of the first parts, the small ones first, and first += that; 16 x 16 by 16 x 8.
__device__ __forceinline__ void multiply_parts(float (&first)[4], float (&rest)[4], const unsigned (&a0)[4], const unsigned (&a1)[4],
                                               const unsigned (&a2)[4], const unsigned* b0, const unsigned* b1, const unsigned* b2) {
  ptx::mma_m16n8k16_bf16(rest, a0, b2[0], b2[1]);
  ptx::mma_m16n8k16_bf16(rest, a2, b0[0], b0[1]);
  ptx::mma_m16n8k16_bf16(rest, a1, b1[0], b1[1]);
  ptx::mma_m16n8k16_bf16(rest, a0, b1[0], b1[1]);
  ptx::mma_m16n8k16_bf16(rest, a1, b0[0], b0[1]);
  ptx::mma_m16n8k16_bf16(first, a0, b0[0], b0[1]);
}

}  // namespace fattn::tile
