// Sums and extremes over the threads of a CTA, in a fixed order. `shared` holds a number a warp; it may be used again after the next __syncthreads.
#pragma once

#include "kernels/ptx/warp.h"

namespace fattn::ops {

using Count = unsigned long long;

__device__ __forceinline__ Count shfl_xor(Count x, int mask) {
  return static_cast<Count>(ptx::shfl_xor(static_cast<unsigned>(x >> 32), mask)) << 32 | ptx::shfl_xor(static_cast<unsigned>(x), mask);
}
__device__ __forceinline__ double shfl_xor(double x, int mask) {
  return __longlong_as_double(static_cast<long long>(shfl_xor(static_cast<Count>(__double_as_longlong(x)), mask)));
}
__device__ __forceinline__ float shfl_xor(float x, int mask) { return ptx::shfl_xor(x, mask); }

// The same in all threads: of x by join(a, b), which does not care which of two comes first.
template <int kThreads, class T, class Join>
__device__ __forceinline__ T joined(T x, T* shared, const Join& join) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x = join(x, shfl_xor(x, mask));
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  x = shared[threadIdx.x % (kThreads / 32)];
#pragma unroll
  for (int mask = kThreads / 64; mask > 0; mask /= 2) x = join(x, shfl_xor(x, mask));
  return x;
}

// The sum of x of the threads before this one. 1024 threads.
__device__ __forceinline__ Count sum_before(Count x, Count* shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const auto up = [&](Count v, int by) {
    const unsigned high = __shfl_up_sync(0xffffffffu, static_cast<unsigned>(v >> 32), by),
                   low = __shfl_up_sync(0xffffffffu, static_cast<unsigned>(v), by);
    return lane >= by ? static_cast<Count>(high) << 32 | low : 0;
  };
  Count to_here = x;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) to_here += up(to_here, by);
  __syncthreads();
  if (lane == 31) shared[warp] = to_here;
  __syncthreads();
  Count of_warps = shared[lane];
#pragma unroll
  for (int by = 1; by < 32; by *= 2) of_warps += up(of_warps, by);
  const int from = max(warp - 1, 0);
  const Count before = static_cast<Count>(__shfl_sync(0xffffffffu, static_cast<unsigned>(of_warps >> 32), from)) << 32 |
                       __shfl_sync(0xffffffffu, static_cast<unsigned>(of_warps), from);
  return (warp == 0 ? 0 : before) + to_here - x;
}

}  // namespace fattn::ops
