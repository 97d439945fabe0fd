// Rotary positions: dimension d of a head is turned with d + headdim / 2.
#pragma once

#include "device_abi/ops_params.h"
#include "device_abi/training_params.h"
#include "kernels/ops/begin.h"
#include "kernels/ops/element.h"

namespace fattn::ops {

// Sine and cosine of position * theta^(-2 d / headdim), in float64 until what is left is less than a turn.
__device__ __forceinline__ float2 sine_and_cosine(int position, int d, int headdim, double log2_theta) {
  const double turns = position * exp2(-2.0 * d / headdim * log2_theta) * 0.15915494309189533577;
  float2 both;
  sincospif(static_cast<float>(2 * (turns - rint(turns))), &both.x, &both.y);
  return both;
}

// Spec: Element, kDependent. A CTA a row; all heads of a row have the same angles.
template <class Spec>
__device__ __forceinline__ void rotary(const RotaryParams& p) {
  using Element = typename Spec::Element;
  __shared__ float2 angles[kOpsThreads];
  begin_kernel<Spec::kDependent>();
  Bits<Element>* x = static_cast<Bits<Element>*>(p.x) + blockIdx.x * p.stride;
  const int half = p.headdim / 2, position = p.position[blockIdx.x], thread = static_cast<int>(threadIdx.x);
  for (int first = 0; first < half; first += kOpsThreads) {
    const int count = min(kOpsThreads, half - first);
    __syncthreads();
    if (thread < count) {
      float2 own = sine_and_cosine(position, first + thread, p.headdim, p.log2_theta);
      if (p.back) own.x = -own.x;
      angles[thread] = own;
    }
    __syncthreads();
    for (long long i = thread; i < static_cast<long long>(p.nheads) * count; i += kOpsThreads) {
      const int head = static_cast<int>(i / count), d = static_cast<int>(i % count);
      const long long at = static_cast<long long>(head) * p.headdim + first + d;
      const float2 angle = angles[d];
      const float a = read<Element>(x, at), b = read<Element>(x, at + half);
      write<Element>(x, at, a * angle.y - b * angle.x);
      write<Element>(x, at + half, b * angle.y + a * angle.x);
    }
  }
}

}  // namespace fattn::ops
