// 16 bytes of a row of fp32, fp16 or bf16 as floats: one access where rows are aligned, else one an element.
#pragma once

#include "kernels/ptx/convert.h"

namespace fattn::standard {

struct f32 {};  // the element type that tensor cores do not read

template <class Element>
inline constexpr bool is_wide = is_same<Element, f32>;

template <class Element>
struct BiasOf {
  using Type = Element;
};
template <>
struct BiasOf<f32> {
  using Type = f16;  // no bias is of 16 bits there
};
template <class Element>
using BiasElement = typename BiasOf<Element>::Type;

template <class Element>
struct BitsOf {
  using Type = unsigned short;
};
template <>
struct BitsOf<f32> {
  using Type = float;
};
template <class Element>
using Bits = typename BitsOf<Element>::Type;

template <class Element>
inline constexpr int kUnit = is_wide<Element> ? 4 : 8;  // elements of 16 bytes

template <class Element>
__device__ __forceinline__ float widened(Bits<Element> x) {
  if constexpr (is_wide<Element>)
    return x;
  else
    return ptx::to_float<Element>(x);
}

template <class Element>
__device__ __forceinline__ Bits<Element> narrowed(float x) {
  if constexpr (is_wide<Element>)
    return x;
  else
    return static_cast<unsigned short>(ptx::pack2<Element>(x, 0.0f) & 0xffffu);
}

template <class Element>
__device__ __forceinline__ float rounded(float x) {
  return widened<Element>(narrowed<Element>(x));
}

template <class Element>
__device__ __forceinline__ float greatest_finite() {
  if constexpr (is_wide<Element>) return __uint_as_float(0x7f7fffffu);
  if constexpr (is_same<Element, f16>) return 65504.0f;
  return __uint_as_float(0x7f7f0000u);
}

template <class Element>
__device__ __forceinline__ void unpack(const uint4& from, float (&x)[kUnit<Element>]) {
  const unsigned words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (is_wide<Element>) {
      x[i] = __uint_as_float(words[i]);
    } else {
      x[2 * i] = ptx::low_float<Element>(words[i]);
      x[2 * i + 1] = ptx::high_float<Element>(words[i]);
    }
  }
}

template <class Element>
__device__ __forceinline__ uint4 pack(const float (&x)[kUnit<Element>]) {
  unsigned words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (is_wide<Element>)
      words[i] = __float_as_uint(x[i]);
    else
      words[i] = ptx::pack2<Element>(x[2 * i], x[2 * i + 1]);
  }
  return {words[0], words[1], words[2], words[3]};
}

// The elements [first, first + kUnit) of a row of `count`; those behind its end are 0.
template <class Element, bool kAligned>
__device__ __forceinline__ void load_unit(const Bits<Element>* row, int first, int count, float (&x)[kUnit<Element>]) {
  if (kAligned && first + kUnit<Element> <= count) return unpack<Element>(*reinterpret_cast<const uint4*>(row + first), x);
#pragma unroll
  for (int e = 0; e < kUnit<Element>; ++e) x[e] = first + e < count ? widened<Element>(row[first + e]) : 0.0f;
}

template <class Element, bool kAligned>
__device__ __forceinline__ void store_unit(Bits<Element>* row, int first, int count, const float (&x)[kUnit<Element>]) {
  if (kAligned && first + kUnit<Element> <= count) {
    *reinterpret_cast<uint4*>(row + first) = pack<Element>(x);
    return;
  }
#pragma unroll
  for (int e = 0; e < kUnit<Element>; ++e)
    if (first + e < count) row[first + e] = narrowed<Element>(x[e]);
}

}  // namespace fattn::standard
