// A warp's 16 x 8 block of dq_accum: how it is added to and read back.
#pragma once

#include "kernels/ptx/reduce.h"

namespace fattn::v2 {

// A lane's four accumulators are neighbours where one instruction adds four floats; elsewhere each of the four goes to a row of 32, so that an
// instruction of the warp touches 128 neighbouring bytes.
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void add_to_dq(float* block, int lane, const float (&x)[4]) { ptx::red_add4(block + 4 * lane, x[0], x[1], x[2], x[3]); }

__device__ __forceinline__ float4 read_dq(const float* block, int lane) { return *reinterpret_cast<const float4*>(block + 4 * lane); }
#else
__device__ __forceinline__ void add_to_dq(float* block, int lane, const float (&x)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) ptx::red_add(block + 32 * e + lane, x[e]);
}

__device__ __forceinline__ float4 read_dq(const float* block, int lane) {
  return {block[lane], block[32 + lane], block[64 + lane], block[96 + lane]};
}
#endif

}  // namespace fattn::v2
