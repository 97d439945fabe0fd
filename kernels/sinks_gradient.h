// Beside a backward pass: the gradient of sinks, -sum(exp(sink - lse) (rowsum(dO * O) - dlse)) over the rows of a head. A sink is a key without a
// value.
//
// The first kernel sums kSinksRows rows a CTA, the second those sums, a CTA a head; always in the same order. Spec: Element; it may be float.
#pragma once

#include "device_abi/lowest.h"
#include "device_abi/sinks_gradient_params.h"
#include "kernels/constants.h"
#include "kernels/ptx/convert.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/ptx/warp.h"

namespace fattn {

// x over the threads of a CTA, in the first of them.
__device__ __forceinline__ float sum_of_cta(float x) {
  __shared__ float of_warp[kSinksThreads / 32];
  const auto [warp, lane] = ptx::thread_place();
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x += ptx::shfl_xor(x, distance);
  if (lane == 0) of_warp[warp] = x;
  __syncthreads();
  x = of_warp[0];
#pragma unroll
  for (int i = 1; i < kSinksThreads / 32; ++i) x += of_warp[i];
  return x;
}

template <class Element>
__device__ __forceinline__ float element_of(const void* row, int column) {
  if constexpr (is_same<Element, float>)
    return static_cast<const float*>(row)[column];
  else
    return ptx::to_float<Element>(static_cast<const unsigned short*>(row)[column]);
}

template <class Spec>
__device__ __forceinline__ void sinks_gradient(const SinksGradientParams& p) {
  constexpr int kBytes = is_same<typename Spec::Element, float> ? 4 : 2;
  const long long parts = (p.all_rows + kSinksRows - 1) / kSinksRows;
  const int head = static_cast<int>(blockIdx.x / parts);
  const auto [warp, lane] = ptx::thread_place();
  const long long first = blockIdx.x % parts * kSinksRows, end = min(first + kSinksRows, p.all_rows);
  const float sink = p.sinks[head * p.sinks_stride];
  float sum = 0;
  for (long long i = first + warp; i < end; i += kSinksThreads / 32) {
    const long long batch = i / p.rows, row = i % p.rows;
    const float lse = p.lse[batch * p.lse_strides.batch + head * p.lse_strides.head + row * p.lse_strides.row];
    if (lse < kLowestLse) continue;  // no gradient
    const auto* const o = static_cast<const char*>(p.o) + (batch * p.o_strides.batch + head * p.o_strides.head + row * p.o_strides.row) * kBytes;
    const auto* const dout =
        static_cast<const char*>(p.dout) + (batch * p.dout_strides.batch + head * p.dout_strides.head + row * p.dout_strides.row) * kBytes;
    float delta = 0;
    for (int column = lane; column < p.headdim_v; column += 32)
      delta = fmaf(element_of<typename Spec::Element>(o, column), element_of<typename Spec::Element>(dout, column), delta);
    if (p.dlse != nullptr && lane == 0) delta -= p.dlse[batch * p.dlse_strides.batch + head * p.dlse_strides.head + row * p.dlse_strides.row];
    sum = fmaf(-expf(sink - lse), delta, sum);
  }
  sum = sum_of_cta(sum);
  if (threadIdx.x == 0) p.parts[blockIdx.x] = sum;
}

template <class Spec>
__device__ __forceinline__ void sinks_gradient_sum(const SinksGradientParams& p) {
  const int head = static_cast<int>(blockIdx.x);
  const long long parts = (p.all_rows + kSinksRows - 1) / kSinksRows;
  float sum = 0;
  for (long long i = threadIdx.x; i < parts; i += kSinksThreads) sum += p.parts[head * parts + i];
  sum = sum_of_cta(sum);
  if (threadIdx.x == 0) p.dsinks[head * p.dsinks_stride] = p.sinks[head * p.sinks_stride] == -kInfinity ? 0.0f : sum;
}

}  // namespace fattn
