// The loss of rows of logits, which become their gradient in place.
#pragma once

#include "device_abi/training_params.h"
#include "kernels/constants.h"
#include "kernels/ops/begin.h"
#include "kernels/ops/cta.h"
#include "kernels/ops/element.h"
#include "kernels/ptx/math.h"

namespace fattn::ops {

// Spec: Element (of the gradient), kDependent. A CTA a row.
template <class Spec>
__device__ __forceinline__ void loss_gradient(const LogitGradientParams& p) {
  constexpr int kStep = kLogitThreads * 4;
  constexpr float kLowest = -0x1.fffffep127f;  // not -Inf, whose difference from itself is NaN
  __shared__ float shared[kLogitThreads / 32];
  begin_kernel<Spec::kDependent>();
  const long long row = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  float* const logits = p.logits + row * p.stride;
  const auto weight_of = [](float logit, float most) { return ptx::ex2((logit - most) * kLog2e); };

  // The greatest logit and the sum of exponentials, in one pass: what is summed so far is brought to each new greatest one.
  float most = kLowest, sum = 0, largest = 0;
  const auto take = [&](float4 x) {
    const float here = fmaxf(most, fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));
    sum = fmaf(sum, weight_of(most, here), (weight_of(x.x, here) + weight_of(x.y, here)) + (weight_of(x.z, here) + weight_of(x.w, here)));
    most = here;
    largest = ptx::max_or_nan(ptx::max_or_nan(largest, ptx::max_or_nan(fabsf(x.x), fabsf(x.y))), ptx::max_or_nan(fabsf(x.z), fabsf(x.w)));
  };
  const int in_fours = p.vocab / 4 * 4;
#pragma unroll 2
  for (int i = thread * 4; i < in_fours; i += kStep) take(*reinterpret_cast<const float4*>(logits + i));
  if (in_fours + thread < p.vocab) {
    const float x = logits[in_fours + thread], here = fmaxf(most, x);
    sum = fmaf(sum, weight_of(most, here), weight_of(x, here));
    most = here;
    largest = ptx::max_or_nan(largest, fabsf(x));
  }
  const float greatest = joined<kLogitThreads>(most, shared, [](float a, float b) { return fmaxf(a, b); });
  sum = joined<kLogitThreads>(sum * weight_of(most, greatest), shared, [](float a, float b) { return a + b; });
  largest = joined<kLogitThreads>(largest, shared, [](float a, float b) { return ptx::max_or_nan(a, b); });

  const int target = p.target[row];
  const bool bad = target < -1 || target >= p.vocab;
  if (thread == 0) {
    const float own = bad ? kNan : target < 0 ? 0 : logits[target];
    p.loss[row] = target == -1 ? 0 : greatest + logf(sum) - own;
    if (p.largest) p.largest[row] = largest < kInfinity ? largest : kNan;
  }
  if (!p.gradient) return;
  const auto scale = static_cast<float>(p.scale_at ? *p.scale_at : p.scale);
  const float share = bad ? kNan : scale / sum;
  for (int first = 0; first < p.padded; first += kStep) {
    const int i = first + thread * 4;
    float4 x = {};
    if (i < p.padded) x = *reinterpret_cast<const float4*>(logits + i);  // the rest of the row is room without meaning
    __syncthreads();                                                     // what is written here has been read: elements before this step's, or of it
    if (i >= p.padded) continue;
    const auto gradient = [&](int at, float logit) {
      return target == -1 || at >= p.vocab ? 0.0f : fmaf(weight_of(logit, greatest), share, at == target ? -scale : 0.0f);
    };
    write4<typename Spec::Element>(logits, i, float4{gradient(i, x.x), gradient(i + 1, x.y), gradient(i + 2, x.z), gradient(i + 3, x.w)});
  }
}

}  // namespace fattn::ops
