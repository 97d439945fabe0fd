// Reductions over a warp in one instruction. PTX ISA, "Parallel Synchronization and Communication Instructions: redux.sync". sm_80 and later.
#pragma once

namespace fattn::ptx {

// The greatest of all lanes' x, which are not negative: their bits are in the same order.
__device__ __forceinline__ float warp_max_nonnegative(float x) {
  unsigned d;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(d) : "r"(__float_as_uint(x)));
  return __uint_as_float(d);
}

}  // namespace fattn::ptx
