// Two neighbouring columns of an output in fp32, from the registers of a fragment.
#pragma once

namespace fattn::v2 {

// At an even column of a row of kWidth that `exists`. kAligned: rows begin at multiples of 8 bytes.
template <int kWidth, bool kAligned>
__device__ __forceinline__ void store_pair(float* row, int column, float low, float high, bool exists) {
  if (!exists || column >= kWidth) return;
  if constexpr (kAligned) {
    *reinterpret_cast<float2*>(row + column) = float2{low, high};
  } else {
    row[column] = low;
    if (column + 1 < kWidth) row[column + 1] = high;
  }
}

}  // namespace fattn::v2
