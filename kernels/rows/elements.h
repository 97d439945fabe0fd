// Numbers of a dtype that is known when a kernel runs, to fp32 and back. As all threads of a kernel have the same one, that costs next to nothing
// where memory is what is waited for.
#pragma once

#include "device_abi/rows_params.h"
#include "kernels/ptx/convert.h"

namespace fattn::rows {

inline constexpr int kF32 = 1, kF16 = 2;

// Nearest even; NaN stays. cvt.rn.bf16x2 is sm_80 and later.
__device__ __forceinline__ unsigned bits_of_bf16(float x) {
  const unsigned bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (bits >> 16) | 0x40u;
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}
__device__ __forceinline__ unsigned pair_of(bool is_f16, float low, float high) {
  return is_f16 ? ptx::cvt_f16x2(low, high) : bits_of_bf16(low) | bits_of_bf16(high) << 16;
}
__device__ __forceinline__ float number_of(bool is_f16, unsigned bits) {
  const auto half = static_cast<unsigned short>(bits & 0xffffu);
  return is_f16 ? ptx::cvt_f32_f16(half) : ptx::cvt_f32_bf16(half);
}

// kUnit numbers side by side: one, or four at a multiple of their bytes.
template <int kUnit>
__device__ __forceinline__ void load(const RowNumbers& from, long long i, float (&x)[kUnit]) {
  static_assert(kUnit == 1 || kUnit == 4);
  const bool is_f16 = from.dtype == kF16;
  if constexpr (kUnit == 4) {
    if (from.dtype == kF32) {
      const float4 four = *reinterpret_cast<const float4*>(static_cast<const float*>(from.data) + i);
      x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    } else {
      const uint2 pairs = *reinterpret_cast<const uint2*>(static_cast<const unsigned short*>(from.data) + i);
      x[0] = number_of(is_f16, pairs.x), x[1] = number_of(is_f16, pairs.x >> 16);
      x[2] = number_of(is_f16, pairs.y), x[3] = number_of(is_f16, pairs.y >> 16);
    }
  } else {
    x[0] = from.dtype == kF32 ? static_cast<const float*>(from.data)[i] : number_of(is_f16, static_cast<const unsigned short*>(from.data)[i]);
  }
}
template <int kUnit>
__device__ __forceinline__ void store(const RowNumbers& to, long long i, const float (&x)[kUnit]) {
  const bool is_f16 = to.dtype == kF16;
  if constexpr (kUnit == 4) {
    if (to.dtype == kF32)
      *reinterpret_cast<float4*>(static_cast<float*>(to.data) + i) = float4{x[0], x[1], x[2], x[3]};
    else
      *reinterpret_cast<uint2*>(static_cast<unsigned short*>(to.data) + i) = uint2{pair_of(is_f16, x[0], x[1]), pair_of(is_f16, x[2], x[3])};
  } else {
    if (to.dtype == kF32)
      static_cast<float*>(to.data)[i] = x[0];
    else
      static_cast<unsigned short*>(to.data)[i] = static_cast<unsigned short>(pair_of(is_f16, x[0], 0.0f) & 0xffffu);
  }
}

// Between two tensors of one dtype.
template <int kUnit>
__device__ __forceinline__ void copy(const RowNumbers& from, long long i, const RowNumbers& to, long long j) {
  if (from.dtype == kF32) {
    const auto* const x = static_cast<const float*>(from.data) + i;
    auto* const y = static_cast<float*>(to.data) + j;
    if constexpr (kUnit == 4)
      *reinterpret_cast<uint4*>(y) = *reinterpret_cast<const uint4*>(x);
    else
      *y = *x;
  } else {
    const auto* const x = static_cast<const unsigned short*>(from.data) + i;
    auto* const y = static_cast<unsigned short*>(to.data) + j;
    if constexpr (kUnit == 4)
      *reinterpret_cast<uint2*>(y) = *reinterpret_cast<const uint2*>(x);
    else
      *y = *x;
  }
}

// Which of the packed sequences has a row: the first that ends behind it; `sequences`: none has.
__device__ __forceinline__ int sequence_of(const int* cu_seqlens, long long stride, int sequences, long long row) {
  int low = 0, high = sequences;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (cu_seqlens[(middle + 1) * stride] > row)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}
// Whether that is sequence n for all of the rows [begin, end), as in every list that rises.
__device__ __forceinline__ bool has_all(const int* cu_seqlens, long long stride, int sequences, int n, long long begin, long long end) {
  int low = 0, high = sequences;
  bool all = true;
  while (low < high) {  // the same way
    const int middle = (low + high) / 2;
    const long long offset = cu_seqlens[(middle + 1) * stride];
    all = all && (middle >= n ? offset >= end : offset <= begin);
    if (middle >= n)
      high = middle;
    else
      low = middle + 1;
  }
  return all;
}

// A row of one head.
struct Row {
  long long batch, row, head;
};
// Heads side by side. Divisions of 64 bits take several times as long.
__device__ __forceinline__ Row row_of(long long i, long long rows, long long seqlen, long long heads) {
  if (rows < (1ll << 31)) {
    const auto of = static_cast<unsigned>(i), each = static_cast<unsigned>(heads), length = static_cast<unsigned>(seqlen), row = of / each;
    return {row / length, row % length, of % each};
  }
  return {i / heads / seqlen, i / heads % seqlen, i % heads};
}
__device__ __forceinline__ long long offset_of(const RowPlaces& s, const Row& r) { return r.batch * s.batch + r.row * s.row + r.head * s.head; }

}  // namespace fattn::rows
