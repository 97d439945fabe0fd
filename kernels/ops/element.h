// Elements of operations in memory: fp32, fp16, bf16 to fp32 and back.
#pragma once

#include "kernels/ptx/convert.h"

namespace fattn::ops {

template <class Element>
struct Stored {
  using Bits = unsigned short;
};
template <>
struct Stored<float> {
  using Bits = float;
};
template <class Element>
using Bits = typename Stored<Element>::Bits;

template <class Element>
__device__ __forceinline__ float read(const void* p, long long i) {
  if constexpr (is_same<Element, float>)
    return static_cast<const float*>(p)[i];
  else
    return ptx::to_float<Element>(static_cast<const unsigned short*>(p)[i]);
}

template <class Element>
__device__ __forceinline__ Bits<Element> stored(float x) {
  if constexpr (is_same<Element, float>)
    return x;
  else
    return static_cast<unsigned short>(ptx::pack2<Element>(x, 0.0f) & 0xffffu);
}

template <class Element>
__device__ __forceinline__ void write(void* p, long long i, float x) {
  static_cast<Bits<Element>*>(p)[i] = stored<Element>(x);
}

// Four elements side by side as they lie in memory, at a multiple of four from an address of as many bytes.
template <class Element>
struct FourStored {
  using Bits = uint2;
};
template <>
struct FourStored<float> {
  using Bits = float4;
};
template <class Element>
using Four = typename FourStored<Element>::Bits;

template <class Element>
__device__ __forceinline__ Four<Element> load4(const void* p, long long i) {
  return *reinterpret_cast<const Four<Element>*>(static_cast<const Bits<Element>*>(p) + i);
}
template <class Element>
__device__ __forceinline__ float4 numbers_of(Four<Element> w) {
  if constexpr (is_same<Element, float>)
    return w;
  else
    return float4{ptx::low_float<Element>(w.x), ptx::high_float<Element>(w.x), ptx::low_float<Element>(w.y), ptx::high_float<Element>(w.y)};
}
template <class Element>
__device__ __forceinline__ float4 read4(const void* p, long long i) {
  return numbers_of<Element>(load4<Element>(p, i));
}
template <class Element>
__device__ __forceinline__ void write4(void* p, long long i, float4 x) {
  if constexpr (is_same<Element, float>)
    *reinterpret_cast<float4*>(static_cast<float*>(p) + i) = x;
  else
    *reinterpret_cast<uint2*>(static_cast<unsigned short*>(p) + i) = uint2{ptx::pack2<Element>(x.x, x.y), ptx::pack2<Element>(x.z, x.w)};
}

}  // namespace fattn::ops
