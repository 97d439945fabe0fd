// The loss of rows whose logits come chunk by chunk: each row keeps its greatest logit, the sum of exponentials and the target's logit.
#pragma once

#include "device_abi/ops_params.h"
#include "kernels/constants.h"
#include "kernels/ops/cta.h"

namespace fattn::ops {

// A CTA a row.
__device__ __forceinline__ void loss(const LossParams& p) {
  __shared__ float shared[kOpsThreads / 32];
  const long long row = blockIdx.x;
  const float* logits = p.logits + row * p.width;
  const auto greater = [](float a, float b) { return fmaxf(a, b); };
  float most = -kInfinity, sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < p.width; i += kOpsThreads) most = fmaxf(most, logits[i]);
  most = joined<kOpsThreads>(most, shared, greater);
  const float before = p.is_first ? -kInfinity : p.greatest[row];
  most = fmaxf(most, before);
  const float reference = most == -kInfinity ? 0 : most;
  for (int i = static_cast<int>(threadIdx.x); i < p.width; i += kOpsThreads) sum += expf(logits[i] - reference);
  sum = joined<kOpsThreads>(sum, shared, [](float a, float b) { return a + b; });
  if (threadIdx.x != 0) return;
  if (!p.is_first) sum += p.sum[row] * expf(before - reference);
  const int target = p.target[row];
  float own = p.is_first ? 0 : p.own[row];
  if (target >= p.first && target < p.first + p.width) own = logits[target - p.first];
  if (p.is_last) {
    const float lse = reference + logf(sum);
    if (p.lse) p.lse[row] = lse;
    if (p.loss) p.loss[row] = target < 0 ? 0 : lse - own;
  } else {
    p.greatest[row] = most;
    p.sum[row] = sum;
    p.own[row] = own;
  }
}

}  // namespace fattn::ops
