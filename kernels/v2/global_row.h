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

// The same of keys or values in pages.
struct PagedRows {
  HeadRows of_head;  // of page 0
  EntryPages pages;
  long long page_stride;
  __device__ __forceinline__ const float* row(int key) const { return of_head.first + pages(key).offset(page_stride, of_head.stride); }
};

// The keys, or values, of a head.
template <bool kPaged>
__device__ __forceinline__ auto key_rows(const AttentionParams& p, int batch, int head) {
  if constexpr (kPaged)
    return PagedRows{HeadRows(p.k, p.k_strides, 0, head), EntryPages(pages_of(p), batch), pages_of(p).k_stride};
  else
    return HeadRows(p.k, p.k_strides, batch, head);
}
template <bool kPaged>
__device__ __forceinline__ auto value_rows(const AttentionParams& p, int batch, int head) {
  if constexpr (kPaged)
    return PagedRows{HeadRows(p.v, p.v_strides, 0, head), EntryPages(pages_of(p), batch), pages_of(p).v_stride};
  else
    return HeadRows(p.v, p.v_strides, batch, head);
}

// The sum of a[i] * b[i], by one lane.
__device__ __forceinline__ float dot_alone(const float* a, const float* b, int count) {
  float sum = 0;
#pragma unroll 1
  for (int i = 0; i < count; ++i) sum = fmaf(a[i], b[i], sum);
  return sum;
}

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

}  // namespace fattn::v2
