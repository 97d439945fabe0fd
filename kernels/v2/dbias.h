// Before and behind a backward pass with dbias: zeros in fp32, to which it adds; and the sums in dbias's dtype, where that is not fp32.
//
// A CTA takes one row of keys. Spec: Element, of dbias.
#pragma once

#include "kernels/ptx/convert.h"
#include "shared/attention_params.h"

namespace fattn::v2 {

struct DbiasRow {
  long long batch, head, row;
};
__device__ __forceinline__ DbiasRow dbias_row(const PairParams& p) {
  const long long index = blockIdx.x, head = index / p.dbias_rows;
  return {head / p.dbias_heads, head % p.dbias_heads, index % p.dbias_rows};
}
__device__ __forceinline__ long long dbias_offset(const TensorStrides& strides, const DbiasRow& at) {
  return at.batch * strides.batch + at.head * strides.head + at.row * strides.row;
}

template <class Spec>
__device__ __forceinline__ void dbias_zero(const PairParams& p) {
  float* const to = p.dbias + dbias_offset(p.dbias_strides, dbias_row(p));
  for (int key = static_cast<int>(threadIdx.x); key < p.seqlen_k; key += kDbiasThreads) to[key] = 0;
}

template <class Spec>
__device__ __forceinline__ void dbias_finish(const PairParams& p) {
  const DbiasRow at = dbias_row(p);
  const float* const from = p.dbias + dbias_offset(p.dbias_strides, at);
  unsigned short* const to = static_cast<unsigned short*>(p.dbias_out) + dbias_offset(p.dbias_out_strides, at);
  for (int key = static_cast<int>(threadIdx.x); key < p.seqlen_k; key += kDbiasThreads)
    to[key] = static_cast<unsigned short>(ptx::pack2<typename Spec::Element>(from[key], 0.0f));
}

}  // namespace fattn::v2
