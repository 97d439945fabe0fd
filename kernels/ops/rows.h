// Operations that are a pass over rows: embedding, keys and values to the cache with rotary positions, a bias.
#pragma once

#include "device_abi/ops_params.h"
#include "kernels/ops/activation.h"
#include "kernels/ops/element.h"
#include "kernels/ptx/dependent_launch.h"

namespace fattn::ops {

template <bool kDependent>
__device__ __forceinline__ void begin_kernel() {
  if constexpr (kDependent) {
    ptx::let_kernel_after_come_up();
    ptx::wait_for_kernel_before();
  }
}

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
      // In float64 until what is left is less than a turn.
      const double turns = p.position[row] * exp2(-2.0 * d / p.headdim * p.log2_theta) * 0.15915494309189533577;
      float s = 0, c = 0;
      sincospif(static_cast<float>(2 * (turns - rint(turns))), &s, &c);
      const int at = head * p.headdim + d;
      const float x = read<Element>(q, at), y = read<Element>(q, at + half);
      write<Element>(q, at, x * c - y * s);
      write<Element>(q, at + half, y * c + x * s);
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
