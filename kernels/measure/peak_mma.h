// The peak of mma.sync: kTiles products of 16 x 8 x 16 (sm_75: 16 x 8 x 8) a warp and iteration, all independent.
#pragma once

#include "kernels/measure/peaks.h"
#include "kernels/ptx/mma.h"

namespace fattn::peaks {

constexpr int kTiles = 16;

template <int kLevel>
__device__ __forceinline__ void mma(float* out, int iterations) {
  float d[kTiles][4] = {};
  unsigned a[2][4], b[kTiles / 2][2];
  for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = noise_pair(threadIdx.x * 64 + i);
  for (int i = 0; i < kTiles; ++i) b[i / 2][i % 2] = noise_pair(threadIdx.x * 64 + 32 + i);
  for (int n = 0; n < iterations; ++n)
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if constexpr (kLevel >= 80)
        ptx::mma_m16n8k16_bf16(d[t], a[t % 2], b[t / 2][0], b[t / 2][1]);
      else
        ptx::mma_m16n8k8_f16(d[t], a[t % 2][0], a[t % 2][1], b[t / 2][0]);
    }
  float sum = 0;
  for (int t = 0; t < kTiles; ++t)
    for (int i = 0; i < 4; ++i) sum += d[t][i];
  if (sum == 12345.678f) out[threadIdx.x] = sum;
}

}  // namespace fattn::peaks
