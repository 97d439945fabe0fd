// Rows of fp32 in global memory, read element by element: for what is computed again.
#pragma once

#include "device_abi/attention_params.h"

namespace fattn::v2 {

struct HeadRows {
  const float* first;
  long long stride;
  __device__ __forceinline__ HeadRows(const void* tensor, const TensorStrides& strides, int batch, int head)
      : first(static_cast<const float*>(tensor) + batch * strides.batch + head * strides.head), stride(strides.row) {}
  __device__ __forceinline__ const float* row(int row) const { return first + row * stride; }
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
