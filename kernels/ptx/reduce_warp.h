// Reductions over a warp in one instruction. PTX ISA, "Parallel Synchronization and Communication Instructions: redux.sync". sm_80 and later.
#pragma once

namespace fattn::ptx {

// The greatest of all lanes' x, which are not negative: their bits are in the same order.
__device__ __forceinline__ float warp_max_nonnegative(float x) {
  unsigned d;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(d) : "r"(__float_as_uint(x)));
  return __uint_as_float(d);
}

// The greatest of all lanes' x; NaN where one is NaN.
__device__ __forceinline__ float warp_max(float x) {
  const int bits = x != x ? 0x7fffffff : __float_as_int(x);
  int d;
  asm volatile("redux.sync.max.s32 %0, %1, 0xffffffff;" : "=r"(d) : "r"(bits ^ (bits >> 31 & 0x7fffffff)));
  return __int_as_float(d ^ (d >> 31 & 0x7fffffff));
}

__device__ __forceinline__ unsigned warp_or(unsigned x) {
  unsigned d;
  asm volatile("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(d) : "r"(x));
  return d;
}

}  // namespace fattn::ptx
