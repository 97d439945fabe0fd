// Loops over numbers side by side, four at a time where they lie at such addresses.
#pragma once

#include "device_abi/ops_params.h"
#include "kernels/ops/element.h"

namespace fattn::ops {

// One number, or four.
template <class Element, int kUnit>
__device__ __forceinline__ void read_unit(const void* p, long long i, float (&x)[kUnit]) {
  if constexpr (kUnit == 4) {
    const float4 four = read4<Element>(p, i);
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
  } else {
    x[0] = read<Element>(p, i);
  }
}
template <class Element, int kUnit>
__device__ __forceinline__ void write_unit(void* p, long long i, const float (&x)[kUnit]) {
  if constexpr (kUnit == 4)
    write4<Element>(p, i, float4{x[0], x[1], x[2], x[3]});
  else
    write<Element>(p, i, x[0]);
}

template <int kUnit>
struct Unit {
  static constexpr int kNumbers = kUnit;
};

// body(Unit, place) for all numbers of a grid of CTAs with kOpsThreads threads; the rest that makes no four is single ones.
template <class Body>
__device__ __forceinline__ void each_unit(long long count, bool wide, const Body& body) {
  const long long thread = static_cast<long long>(blockIdx.x) * kOpsThreads + threadIdx.x, all = static_cast<long long>(gridDim.x) * kOpsThreads;
  const long long in_fours = wide ? count / 4 * 4 : 0;
  for (long long i = thread * 4; i < in_fours; i += all * 4) body(Unit<4>{}, i);
  for (long long i = in_fours + thread; i < count; i += all) body(Unit<1>{}, i);
}

}  // namespace fattn::ops
