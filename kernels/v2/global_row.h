// Rows of fp32 in global memory, read element by element: for what is computed again.
#pragma once

#include "device_abi/attention_params.h"
#include "kernels/pages.h"

namespace fattn::v2 {

struct HeadRows {
  const float* first;
  long long stride;
  __device__ __forceinline__ HeadRows(const void* tensor, const TensorStrides& strides, int batch, int head)
      : first(static_cast<const float*>(tensor) + batch * strides.batch + head * strides.head), stride(strides.row) {}
  __device__ __forceinline__ const float* row(int row) const { return first + row * stride; }
};

// The same of keys or values, which may be in pages; `call` is what the kernel was told.
template <bool kPaged>
struct KeyRows : HeadRows {
  using HeadRows::HeadRows;
  static __device__ __forceinline__ KeyRows keys(const AttentionParams& p, const AttentionParams&, int batch, int head) {
    return {p.k, p.k_strides, batch, head};
  }
  static __device__ __forceinline__ KeyRows values(const AttentionParams& p, const AttentionParams&, int batch, int head) {
    return {p.v, p.v_strides, batch, head};
  }
};
template <>
struct KeyRows<true> {
  HeadRows of_head;  // of page 0
  EntryPages pages;
  long long page_stride;
  static __device__ __forceinline__ KeyRows keys(const AttentionParams& p, const AttentionParams& call, int batch, int head) {
    return {{p.k, p.k_strides, 0, head}, {pages_of(call), batch}, pages_of(call).k_stride};
  }
  static __device__ __forceinline__ KeyRows values(const AttentionParams& p, const AttentionParams& call, int batch, int head) {
    return {{p.v, p.v_strides, 0, head}, {pages_of(call), batch}, pages_of(call).v_stride};
  }
  __device__ __forceinline__ const float* row(int key) const { return of_head.first + pages(key).offset(page_stride, of_head.stride); }
};

// The sum of a[i] * b[i], by one lane.
__device__ __forceinline__ float dot_alone(const float* a, const float* b, int count) {
  float sum = 0;
#pragma unroll 1
  for (int i = 0; i < count; ++i) sum = fmaf(a[i], b[i], sum);
  return sum;
}

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

}  // namespace fattn::v2
