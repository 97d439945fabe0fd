// Kernels that do nothing but keep one unit of the device busy, to learn its peak: fp32 FMA, matrix products by warp
// (mma.sync) and by warpgroup (wgmma), reads of memory. What they compute is of no use, but is written where the compiler
// cannot know that.
#pragma once

#include "kernels/ptx/element.h"

namespace fattn::peaks {

// A number of the kind that inputs have: the power that products take, and with it the clock, depends on the bits.
__device__ __forceinline__ unsigned noise(unsigned seed) {
  seed ^= seed >> 16;
  seed *= 0x7feb352du;
  seed ^= seed >> 15;
  seed *= 0x846ca68bu;
  return seed ^ (seed >> 16);
}
// Two bf16 (or f16) between 0.5 and 2 in size, of random sign.
__device__ __forceinline__ unsigned noise_pair(unsigned seed) { return (noise(seed) & 0x807f807fu) | 0x3f003f00u; }

// 32 * iterations FMA a thread.
__device__ __forceinline__ void fma(float* out, int iterations) {
  float x[8];
  const float a = 1.0f + 1e-7f * threadIdx.x, b = 1e-6f * threadIdx.x;
  for (int i = 0; i < 8; ++i) x[i] = a + i;
  for (int n = 0; n < iterations; ++n)
#pragma unroll
    for (int i = 0; i < 32; ++i) x[i % 8] = x[i % 8] * a + b;
  float sum = 0;
  for (int i = 0; i < 8; ++i) sum += x[i];
  if (sum == 12345.678f) out[threadIdx.x] = sum;
}

// Every thread reads 16 bytes at a time, the whole grid side by side.
__device__ __forceinline__ void read(const uint4* data, long long count, float* out) {
  unsigned sum = 0;
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 3 * step < count; i += 4 * step) {
    const uint4 a = data[i], b = data[i + step], c = data[i + 2 * step], d = data[i + 3 * step];
    sum += a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
  }
  for (; i < count; i += step) sum += data[i].x ^ data[i].y ^ data[i].z ^ data[i].w;
  if (sum == 0x12345678u) out[threadIdx.x] = 1.0f;
}

}  // namespace fattn::peaks
