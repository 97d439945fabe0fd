// A row of o from the registers of four lanes (the accumulator layout of wgmma, kernels/ptx/wgmma.h) to global memory.
#pragma once

#include "kernels/ptx/convert.h"
#include "kernels/ptx/math.h"
#include "kernels/ptx/warp.h"

namespace fattn::v3 {

// The lanes' first row (kRow = 0) or second (1) of o, times `factor`, to the `columns` elements at `row`, which is aligned to 8 bytes. Neighbouring
// lanes swap every other pair of elements, so that each has four in a row and 32 bytes are written whole. The result is 0, or NaN if kLook and there
// is a NaN in the lane's part of the row. All lanes of a warp together.
template <class Element, int kRow, bool kLook, int kWidth>
__device__ __forceinline__ unsigned store_row(const float (&o)[kWidth], float factor, unsigned short* row, int columns, int lane) {
  const bool odd = lane % 2 == 1;
  const int first = odd * 8 + lane % 4 / 2 * 4;
  unsigned zero = 0;
#pragma unroll
  for (int i = 0; i < kWidth / 4; i += 2) {  // columns 8 i to 8 i + 15 of the row
    const unsigned left = ptx::pack2<Element>(o[4 * i + 2 * kRow] * factor, o[4 * i + 2 * kRow + 1] * factor);
    const unsigned right = ptx::pack2<Element>(o[4 * i + 2 * kRow + 4] * factor, o[4 * i + 2 * kRow + 5] * factor);
    if constexpr (kLook) zero = ptx::fma2<Element>(right, 0, ptx::fma2<Element>(left, 0, zero));
    const unsigned other = ptx::shfl_xor(odd ? left : right, 1);
    const uint2 four{odd ? other : left, odd ? right : other};
    const int column = first + i * 8;
    if (column + 4 <= columns) {
      *reinterpret_cast<uint2*>(row + column) = four;
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (column + e < columns) row[column + e] = static_cast<unsigned short>((e < 2 ? four.x : four.y) >> e % 2 * 16);
    }
  }
  return zero;
}

// The same to a row of fp32: four neighbouring lanes write 32 bytes.
template <int kRow, bool kLook, int kWidth>
__device__ __forceinline__ unsigned store_fp32_row(const float (&o)[kWidth], float factor, float* row, int columns, int lane) {
  float zero = 0;
#pragma unroll
  for (int i = 0; i < kWidth / 4; ++i) {  // columns 8 i to 8 i + 7 of the row
    const float low = o[4 * i + 2 * kRow] * factor, high = o[4 * i + 2 * kRow + 1] * factor;
    if constexpr (kLook) zero = fmaf(high, 0.0f, fmaf(low, 0.0f, zero));
    const int column = i * 8 + lane % 4 * 2;
    if (column + 2 <= columns)
      *reinterpret_cast<float2*>(row + column) = float2{low, high};
    else if (column < columns)
      row[column] = low;
  }
  return __float_as_uint(zero);
}

}  // namespace fattn::v3
