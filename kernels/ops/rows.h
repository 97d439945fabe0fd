// Operations that are a pass over rows: embedding, keys and values to the cache with rotary positions, a bias.
#pragma once

#include "device_abi/ops_params.h"
#include "kernels/ops/activation.h"
#include "kernels/ops/begin.h"
#include "kernels/ops/element.h"
#include "kernels/ops/rotary.h"

namespace fattn::ops {

// Spec: Element, kDependent. A CTA a row. An id or position out of range gives NaN: the host has checked them where it knows them.
template <class Spec>
__device__ __forceinline__ void embedding(const EmbeddingParams& p) {
  using Element = typename Spec::Element;
  begin_kernel<Spec::kDependent>();
  const long long row = blockIdx.x;
  const int id = p.ids[row], position = p.positions ? p.position[row] : 0;
  const bool bad = id < 0 || id >= p.vocab || (p.positions && (position < 0 || position >= p.n_positions));
  for (int i = static_cast<int>(threadIdx.x); i < p.width; i += kOpsThreads) {
    float x = bad ? __uint_as_float(0x7fffffffu) : read<Element>(p.tokens, static_cast<long long>(id) * p.width + i);
    if (!bad && p.positions) x += read<Element>(p.positions, static_cast<long long>(position) * p.width + i);
    p.out[row * p.width + i] = x;
  }
}

// Spec: Element, kRotary, kWide (heads are multiples of 16 bytes), kDependent. A CTA a row.
template <class Spec>
__device__ __forceinline__ void keys_values(const KeysValuesParams& p) {
  using Element = typename Spec::Element;
  begin_kernel<Spec::kDependent>();
  const long long row = blockIdx.x;
  const int q_width = p.nheads * p.headdim, width = p.nheads_k * p.headdim;
  Bits<Element>* q = static_cast<Bits<Element>*>(p.qkv) + row * (q_width + 2 * width);
  const long long slot = p.slot ? p.slot[row] : row;
  Bits<Element>*k = static_cast<Bits<Element>*>(p.k) + slot * width, *v = static_cast<Bits<Element>*>(p.v) + slot * width;
  if constexpr (Spec::kRotary) {
    const int half = p.headdim / 2;
    for (int i = static_cast<int>(threadIdx.x); i < (p.nheads + p.nheads_k) * half; i += kOpsThreads) {
      const int head = i / half, d = i % half;
      const float2 angle = sine_and_cosine(p.position[row], d, p.headdim, p.log2_theta);
      const int at = head * p.headdim + d;
      const float x = read<Element>(q, at), y = read<Element>(q, at + half);
      write<Element>(q, at, x * angle.y - y * angle.x);
      write<Element>(q, at + half, y * angle.y + x * angle.x);
    }
    __syncthreads();
  }
  if (slot < 0) return;
  const Bits<Element>* from = q + q_width;
  if constexpr (Spec::kWide) {
    constexpr int kUnit = 16 / sizeof(Bits<Element>);
    for (int i = static_cast<int>(threadIdx.x) * kUnit; i < width; i += kOpsThreads * kUnit) {
      *reinterpret_cast<uint4*>(k + i) = *reinterpret_cast<const uint4*>(from + i);
      *reinterpret_cast<uint4*>(v + i) = *reinterpret_cast<const uint4*>(from + width + i);
    }
  } else {
    for (int i = static_cast<int>(threadIdx.x); i < width; i += kOpsThreads) {
      k[i] = from[i];
      v[i] = from[width + i];
    }
  }
}

// Spec: Element (of the bias, and of y unless that is fp32), kSingle (y is fp32), kActivation, kBias.
template <class Spec>
__device__ __forceinline__ void add_bias(const BiasParams& p) {
  using Y = typename Spec::Y;
  for (long long i = static_cast<long long>(blockIdx.x) * kOpsThreads + threadIdx.x; i < p.count;
       i += static_cast<long long>(gridDim.x) * kOpsThreads) {
    float x = read<Y>(p.y, i);
    if (p.bias) x += read<typename Spec::Element>(p.bias, i % p.width);
    write<Y>(p.y, i, activated<Spec::kActivation>(x));
  }
}

}  // namespace fattn::ops
