// Sums over the rows of a matrix, in two stages of a fixed order: parts of the rows, then the parts.
#pragma once

#include "device_abi/training_params.h"
#include "kernels/ops/begin.h"
#include "kernels/ops/wide.h"

namespace fattn::ops {

// A warp takes every eighth row of the CTA's part, a lane kUnit columns.
template <class Element, int kUnit>
__device__ __forceinline__ void sum_strip(const ColumnSumsParams& p, float* shared) {
  constexpr int kWarps = kOpsThreads / 32, kColumns = 32 * kUnit;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const long long part = blockIdx.x / p.strips;
  const int first = static_cast<int>(blockIdx.x % p.strips) * kColumns, column = first + lane * kUnit;
  float sums[kUnit] = {};
  if (column < p.columns) {
    const long long end = min(p.rows, (part + 1) * p.rows_of_part);
#pragma unroll 8
    for (long long row = part * p.rows_of_part + warp; row < end; row += kWarps) {
      float x[kUnit];
      read_unit<Element>(p.x, row * p.columns + column, x);
#pragma unroll
      for (int k = 0; k < kUnit; ++k) sums[k] += x[k];
    }
  }
#pragma unroll
  for (int k = 0; k < kUnit; ++k) shared[warp * kColumns + lane * kUnit + k] = sums[k];
  __syncthreads();
  if (thread >= kColumns || first + thread >= p.columns) return;
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += shared[w * kColumns + thread];
  p.parts[part * p.columns + first + thread] = sum;
}

// Spec: Element, kDependent.
template <class Spec>
__device__ __forceinline__ void column_sums(const ColumnSumsParams& p) {
  __shared__ float shared[kOpsThreads / 32 * 32 * 4];
  begin_kernel<Spec::kDependent>();
  if (p.wide)
    sum_strip<typename Spec::Element, 4>(p, shared);
  else
    sum_strip<typename Spec::Element, 1>(p, shared);
}

// Spec: kDependent. A CTA has 32 columns.
template <class Spec>
__device__ __forceinline__ void join_sums(const JoinSumsParams& p) {
  constexpr int kWarps = kOpsThreads / 32;
  __shared__ float shared[kWarps][32];
  begin_kernel<Spec::kDependent>();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int column = static_cast<int>(blockIdx.x) * 32 + lane;
  float sum = 0;
  if (column < p.columns) {
#pragma unroll 8
    for (int part = warp; part < p.n_parts; part += kWarps) sum += p.parts[static_cast<long long>(part) * p.columns + column];
  }
  shared[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || column >= p.columns) return;
  sum = shared[0][lane];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) sum += shared[w][lane];
  if (column < p.split)
    p.to[column] += sum;
  else
    p.second[column - p.split] += sum;
}

}  // namespace fattn::ops
