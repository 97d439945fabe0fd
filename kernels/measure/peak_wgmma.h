// The peak of wgmma: eight products of 64 x 256 x 16 a warpgroup and iteration, operands in shared memory. While one warpgroup
// waits for its products, the other's keep the tensor cores busy.
#pragma once

#include "kernels/measure/peaks.h"
#include "kernels/ptx/async_proxy.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/wgmma.h"

namespace fattn::peaks {

constexpr int kOperandBytes = 40 * 1024;  // A 64 x 64 and B 256 x 64 of 2 bytes

__device__ __forceinline__ void wgmma(float* out, int iterations) {
  __shared__ __align__(1024) unsigned operands[kOperandBytes / 4];
  for (unsigned i = threadIdx.x; i < kOperandBytes / 4; i += blockDim.x) operands[i] = noise_pair(i);
  __syncthreads();
  ptx::async_proxy_fence();
  const unsigned a = ptx::wgmma_descriptor(ptx::shared_address(operands), 0), b = a + 8192 / 16;  // any bits will do, as only the speed counts
  float d[128] = {};
  for (int n = 0; n < iterations; ++n) {
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; ++k) ptx::wgmma<bf16, true>(d, a + 2 * (k % 4), b + 2 * (k % 4));
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
  }
  float sum = 0;
  for (int i = 0; i < 128; ++i) sum += d[i];
  if (sum == 12345.678f) out[threadIdx.x] = sum;
}

}  // namespace fattn::peaks
