// The losses of a pass in one number, and the largest logit: by one CTA, in a fixed order.
#pragma once

#include "device_abi/training_params.h"
#include "kernels/ops/begin.h"
#include "kernels/ops/cta.h"
#include "kernels/ptx/math.h"

namespace fattn::ops {

// Spec: kDependent. One CTA.
template <class Spec>
__device__ __forceinline__ void loss_sums(const LossSumsParams& p) {
  __shared__ double sums[kLogitThreads / 32];
  __shared__ float extremes[kLogitThreads / 32];
  begin_kernel<Spec::kDependent>();
  double sum = 0;
  float largest = 0;
#pragma unroll 4
  for (int row = static_cast<int>(threadIdx.x); row < p.rows; row += kLogitThreads) {
    const bool counts = p.target[row] >= 0;
    sum += counts ? static_cast<double>(p.loss[row]) : 0.0;
    largest = ptx::max_or_nan(largest, counts ? p.largest[row] : 0.0f);
  }
  sum = joined<kLogitThreads>(sum, sums, [](double a, double b) { return a + b; });
  largest = joined<kLogitThreads>(largest, extremes, [](float a, float b) { return ptx::max_or_nan(a, b); });
  if (threadIdx.x != 0) return;
  p.sums[0] += sum;
  const double before = p.sums[1];
  p.sums[1] = static_cast<double>(largest) <= before || before != before ? before : static_cast<double>(largest);
}

}  // namespace fattn::ops
