// Rows of dx are added to the rows of a table that they were looked up in, without sorting and without atomics: the CTA of a row ends if an earlier
// row has the same id, else it adds all rows of that id in their order.
//
// Cost, for 32 x 1024 rows of 768 numbers: tokens that are frequent find an earlier row at once, so about 8,000 CTAs, one for each token that is
// there, look at all ids (128 KiB, from the L1 or L2 cache, in 32 steps): some 0.1 ms on an H100; dx is read once (100 MB, 0.03 ms); the most
// frequent token (5 % of all) has 1,600 rows, 6 loads of which are under way: 0.2 ms. Together less than 0.6 ms, 1 % of a step of 62 ms. Rows that
// are all alike would take 3 ms.
#pragma once

#include "device_abi/training_params.h"
#include "kernels/ops/begin.h"
#include "kernels/ops/wide.h"
#include "kernels/ptx/warp.h"

namespace fattn::ops {

inline constexpr int kIdsOfThread = 4, kIdsOfStep = kOpsThreads * kIdsOfThread;

// Adds rows list[0..n) of dx to a row of the table.
template <int kUnit>
__device__ __forceinline__ void add_rows(const float* dx, const int* list, int n, int width, float* to) {
  constexpr int kAhead = 6;  // more would leave a multiprocessor fewer CTAs that search
  for (int at = static_cast<int>(threadIdx.x) * kUnit; at < width; at += kOpsThreads * kUnit) {
    float sum[kUnit] = {};
#pragma unroll 1
    for (int first = 0; first < n; first += kAhead) {
      float x[kAhead][kUnit];
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (first + i < n) read_unit<float>(dx, static_cast<long long>(list[first + i]) * width + at, x[i]);
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (first + i < n) {
#pragma unroll
          for (int k = 0; k < kUnit; ++k) sum[k] += x[i][k];
        }
    }
    float before[kUnit];
    read_unit<float>(to, at, before);
#pragma unroll
    for (int k = 0; k < kUnit; ++k) before[k] += sum[k];
    write_unit<float>(to, at, before);
  }
}

// Spec: kDependent. Rows whose id is out of range are added nowhere.
template <class Spec>
__device__ __forceinline__ void embedding_gradient(const EmbeddingGradientParams& p) {
  constexpr int kWarps = kOpsThreads / 32;
  __shared__ int list[kIdsOfStep], found_by[kWarps];
  begin_kernel<Spec::kDependent>();
  const int row = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int id = p.ids[row];
  if (id < 0 || id >= p.entries) return;
  for (long long first = 0; first < row; first += kIdsOfStep) {
    bool found = false;
#pragma unroll
    for (int k = 0; k < kIdsOfThread; ++k) {
      const long long i = first + k * kOpsThreads + thread;
      if (i < row) found |= p.ids[i] == id;
    }
    if (__syncthreads_or(found ? 1 : 0)) return;
  }
  float* to = p.to + static_cast<long long>(id) * p.width;
  for (long long first = row; first < p.rows; first += kIdsOfStep) {
    // A thread has neighbours, so that the list is in order.
    const long long begin = first + thread * kIdsOfThread;
    unsigned mine = 0;
#pragma unroll
    for (int k = 0; k < kIdsOfThread; ++k)
      if (begin + k < p.rows && p.ids[begin + k] == id) mine |= 1u << k;
    if (!__syncthreads_or(static_cast<int>(mine))) continue;
    const int own = __popc(mine);
    int to_here = own;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const int before = __shfl_up_sync(0xffffffffu, to_here, by);
      if (lane >= by) to_here += before;
    }
    if (lane == 31) found_by[warp] = to_here;
    __syncthreads();
    int at = to_here - own, n = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) at += found_by[w];
      n += found_by[w];
    }
#pragma unroll
    for (int k = 0; k < kIdsOfThread; ++k)
      if (mine >> k & 1) list[at++] = static_cast<int>(begin) + k;
    __syncthreads();
    if (p.wide)
      add_rows<4>(p.dx, list, n, p.width, to);
    else
      add_rows<1>(p.dx, list, n, p.width, to);
    __syncthreads();  // of the list, which is written anew
  }
}

}  // namespace fattn::ops
