// Before and behind a backward pass with dbias: zeros in fp32, to which it adds; and the sums in dbias's dtype, where that is not fp32.
//
// A CTA takes one row of keys. Spec: Element, of dbias.
#pragma once

#include "device_abi/attention_params.h"
#include "kernels/ptx/convert.h"

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

// Calls four(key) for groups of four keys and one(key) for the others; `whole`: all addresses are such that four can go at once.
template <class Four, class One>
__device__ __forceinline__ void for_each_key(int keys, bool whole, const Four& four, const One& one) {
  const int in_fours = whole ? keys / 4 * 4 : 0;
  for (int key = 4 * static_cast<int>(threadIdx.x); key < in_fours; key += 4 * kDbiasThreads) four(key);
  for (int key = in_fours + static_cast<int>(threadIdx.x); key < keys; key += kDbiasThreads) one(key);
}
__device__ __forceinline__ bool is_multiple(const void* pointer, int bytes) { return reinterpret_cast<unsigned long long>(pointer) % bytes == 0; }

template <class Spec>
__device__ __forceinline__ void dbias_zero(const PairParams& p) {
  float* const to = p.dbias + dbias_offset(p.dbias_strides, dbias_row(p));
  for_each_key(
      p.seqlen_k, is_multiple(to, 16),
      [&](int key) {
        *reinterpret_cast<float4*>(to + key) = {0, 0, 0, 0};
      },
      [&](int key) { to[key] = 0; });
}

template <class Spec>
__device__ __forceinline__ void dbias_finish(const PairParams& p) {
  using Element = typename Spec::Element;
  const DbiasRow at = dbias_row(p);
  const float* const from = p.dbias + dbias_offset(p.dbias_strides, at);
  unsigned short* const to = static_cast<unsigned short*>(p.dbias_out) + dbias_offset(p.dbias_out_strides, at);
  for_each_key(
      p.seqlen_k, is_multiple(from, 16) && is_multiple(to, 8),
      [&](int key) {
        const float4 x = *reinterpret_cast<const float4*>(from + key);
        *reinterpret_cast<uint2*>(to + key) = {ptx::pack2<Element>(x.x, x.y), ptx::pack2<Element>(x.z, x.w)};
      },
      [&](int key) { to[key] = static_cast<unsigned short>(ptx::pack2<Element>(from[key], 0.0f)); });
}

}  // namespace fattn::v2
