// Sums of softmax parts that have references of their own, and what becomes of them.
#pragma once

#include "device_abi/decode_work.h"
#include "kernels/constants.h"
#include "kernels/decode/place.h"
#include "kernels/pair.h"
#include "kernels/ptx/convert.h"
#include "kernels/ptx/math.h"

namespace fattn::decode {

// What to multiply sums with shift `from` by, so that they have shift `to`, the least of all parts. Where no key was seen (inf) the sums are 0,
// or NaN, which is to stay.
__device__ __forceinline__ float factor_of(float from, float to) { return from == kInfinity ? 1.0f : ptx::ex2(to - from); }

// Writes four columns of o, and with the first of them lse, from sums of all keys.
template <class Spec>
__device__ __forceinline__ void store_row(const AttentionParams& p, const DecodeWork& work, int batch, int head_k, int row, int column,
                                          const float (&o)[4], float shift, float sum) {
  constexpr bool kSinks = requires { Spec::kSinks; };
  const bool empty = sum == 0;
  [[maybe_unused]] float sinked_lse;
  if constexpr (kSinks) {
    const SinkedRow<> sinked(work.sinks[(head_k * p.group + row % p.group) * work.sinks_stride], shift, sum, empty);
    sum = sinked.sum;
    sinked_lse = sinked.lse;
  }
  const float inverse = empty ? 0.0f : 1.0f / sum;
  const auto value = [&](int i) { return empty ? 0.0f : o[i] * inverse; };
  const long long at = row_offset(p, p.o_strides, batch, head_k, row) + column;
  if constexpr (requires { Spec::kFp32Out; })
    *reinterpret_cast<float4*>(static_cast<float*>(p.o) + at) = float4{value(0), value(1), value(2), value(3)};
  else
    *reinterpret_cast<uint2*>(static_cast<unsigned short*>(p.o) + at) =
        uint2{ptx::pack2<typename Spec::Element>(value(0), value(1)), ptx::pack2<typename Spec::Element>(value(2), value(3))};
  if (p.lse != nullptr && column == 0) {
    constexpr float kLn2 = 0.693147180559945309f;
    p.lse[row_offset(p, p.lse_strides, batch, head_k, row)] = kSinks ? sinked_lse : empty ? -kInfinity : fmaf(-shift, kLn2, logf(sum));
  }
}

}  // namespace fattn::decode
