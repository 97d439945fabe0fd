// Rows of one head in global memory, element by element: for what is seldom used.
#pragma once

#include "device_abi/attention_params.h"
#include "kernels/ptx/convert.h"

namespace fattn::v3 {

template <class Element>
struct GlobalRows {
  const unsigned short* first;
  long long stride;
  __device__ __forceinline__ unsigned short bits(int row, int column) const { return first[row * stride + column]; }
  __device__ __forceinline__ float value(int row, int column) const { return ptx::to_float<Element>(bits(row, column)); }
};
template <class Element>
__device__ __forceinline__ GlobalRows<Element> rows_of(const void* tensor, const TensorStrides& strides, int batch, int head, int first = 0) {
  return {static_cast<const unsigned short*>(tensor) + batch * strides.batch + head * strides.head + first * strides.row, strides.row};
}

}  // namespace fattn::v3
