// Kernels that keep one more unit of the device busy, to learn its rate: exponentials, shared memory, the L2 cache, copies in memory; and one that
// does nothing, to learn what a launch takes.
#pragma once

#include "kernels/measure/peaks.h"
#include "kernels/ptx/math.h"
#include "kernels/ptx/shared_memory.h"

namespace fattn::peaks {

// 32 * iterations ex2 a thread, in eight chains that stay finite.
__device__ __forceinline__ void exponentials(float* out, int iterations) {
  float x[8];
  for (int i = 0; i < 8; ++i) x[i] = 0.125f * i + 1e-3f * threadIdx.x;
  for (int n = 0; n < iterations; ++n)
#pragma unroll
    for (int i = 0; i < 32; ++i) x[i % 8] = ptx::ex2(-x[i % 8]);
  float sum = 0;
  for (int i = 0; i < 8; ++i) sum += x[i];
  if (sum == 12345.678f) out[threadIdx.x] = sum;
}

constexpr int kSharedBytes = 32 * 1024;  // of a block, all of which an iteration reads once

__device__ __forceinline__ uint4 load_shared_again(unsigned address) {
  uint4 x;
  asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address));
  return x;
}

// 16 bytes at a time, a warp's side by side, so that no two threads want the same bank. Blocks of 256 threads.
__device__ __forceinline__ void shared_reads(float* out, int iterations) {
  __shared__ __align__(16) unsigned words[kSharedBytes / 4];
  for (unsigned i = threadIdx.x; i < kSharedBytes / 4; i += blockDim.x) words[i] = noise(i);
  __syncthreads();
  const unsigned first = ptx::shared_address(words) + 16 * threadIdx.x;
  unsigned sum = 0;
  for (int n = 0; n < iterations; ++n)
#pragma unroll
    for (int i = 0; i < kSharedBytes / (256 * 16); ++i) {
      const uint4 x = load_shared_again(first + i * 256 * 16);
      sum ^= x.x ^ x.y ^ x.z ^ x.w;
    }
  if (sum == 0x12345678u) out[threadIdx.x] = 1.0f;
}

// Past the L1 cache, every time anew.
__device__ __forceinline__ uint4 load_l2(const uint4* from) {
  uint4 x;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
  return x;
}

// All of `data`, which fits in the L2 cache, `rounds` times by the whole grid. count: a multiple of four times the grid's threads.
__device__ __forceinline__ void l2_reads(const uint4* data, long long count, int rounds, float* out) {
  unsigned sum = 0;
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x, first = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int n = 0; n < rounds; ++n)
    for (long long i = first; i < count; i += 4 * step) {
      const uint4 a = load_l2(data + i), b = load_l2(data + i + step), c = load_l2(data + i + 2 * step), d = load_l2(data + i + 3 * step);
      sum ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
  if (sum == 0x12345678u) out[threadIdx.x] = 1.0f;
}

// 16 bytes at a time, the whole grid side by side.
__device__ __forceinline__ void copy(const uint4* from, uint4* to, long long count) {
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 3 * step < count; i += 4 * step) {
    const uint4 a = from[i], b = from[i + step], c = from[i + 2 * step], d = from[i + 3 * step];
    to[i] = a, to[i + step] = b, to[i + 2 * step] = c, to[i + 3 * step] = d;
  }
  for (; i < count; i += step) to[i] = from[i];
}

}  // namespace fattn::peaks
