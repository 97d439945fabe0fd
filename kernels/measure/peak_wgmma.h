// The peak of wgmma: eight products of 64 x 256 x 16 a warpgroup and iteration, operands in shared memory. While one warpgroup
// waits for its products, the other's keep the tensor cores busy.
#pragma once

#include "kernels/measure/peaks.h"
#include "kernels/ptx/wgmma.h"

namespace fattn::peaks {

constexpr int kOperandBytes = 40 * 1024;  // A 64 x 64 and B 256 x 64 of 2 bytes

__device__ __forceinline__ void wgmma(float* out, int iterations) {
  __shared__ __align__(1024) unsigned operands[kOperandBytes / 4];
  for (unsigned i = threadIdx.x; i < kOperandBytes / 4; i += blockDim.x) operands[i] = noise_pair(i);
  __syncthreads();
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  // Swizzle of 128 bytes, 1024 bytes from 8 rows to the next 8; any bits will do, as only the speed counts.
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(operands));
  const auto descriptor = [](unsigned at) { return (1ull << 62) | (64ull << 32) | ((at & 0x3ffffu) >> 4); };
  float d[128] = {};
  for (int n = 0; n < iterations; ++n) {
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; ++k) ptx::wgmma_m64n256k16_bf16(d, descriptor(address + 32 * (k % 4)), descriptor(address + 8192 + 32 * (k % 4)));
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
  }
  float sum = 0;
  for (int i = 0; i < 128; ++i) sum += d[i];
  if (sum == 12345.678f) out[threadIdx.x] = sum;
}

}  // namespace fattn::peaks
