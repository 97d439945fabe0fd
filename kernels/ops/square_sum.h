// The sum of squares in float64, in two stages of a fixed order.
#pragma once

#include "device_abi/training_params.h"
#include "kernels/constants.h"
#include "kernels/ops/begin.h"
#include "kernels/ops/cta.h"
#include "kernels/ops/wide.h"

namespace fattn::ops {

__device__ __forceinline__ double cta_sum(double x, double* shared) {
  return joined<kOpsThreads>(x, shared, [](double a, double b) { return a + b; });
}

// Spec: kDependent.
template <class Spec>
__device__ __forceinline__ void square_sum(const SquareSumParams& p) {
  __shared__ double shared[kOpsThreads / 32];
  begin_kernel<Spec::kDependent>();
  double sums[4] = {};  // so that none waits for the one before
  each_unit(p.count, p.wide != 0, [&](auto unit, long long i) {
    constexpr int kUnit = decltype(unit)::kNumbers;
    float x[kUnit];
    read_unit<float>(p.x, i, x);
#pragma unroll
    for (int k = 0; k < kUnit; ++k) sums[k] = fma(static_cast<double>(x[k]), static_cast<double>(x[k]), sums[k]);
  });
  const double sum = cta_sum((sums[0] + sums[1]) + (sums[2] + sums[3]), shared);
  if (threadIdx.x == 0) p.parts[blockIdx.x] = sum;
}

// Spec: kDependent. One CTA.
template <class Spec>
__device__ __forceinline__ void join_squares(const JoinSquaresParams& p) {
  __shared__ double shared[kOpsThreads / 32];
  begin_kernel<Spec::kDependent>();
  double sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < p.n_parts; i += kOpsThreads) sum += p.parts[i];
  sum = cta_sum(sum, shared);
  if (threadIdx.x == 0) *p.sum = p.finite && !(fabs(*p.finite) < kInfinity) ? static_cast<double>(kNan) : sum;
}

}  // namespace fattn::ops
