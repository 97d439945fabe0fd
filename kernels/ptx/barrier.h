// Barriers among the warps of a CTA. PTX ISA, "Parallel Synchronization and Communication Instructions: barrier / bar".
#pragma once

namespace fattn::ptx {

// Named barrier `id` (1 to 15; 0 is __syncthreads) of `threads` threads, a multiple of 32.
__device__ __forceinline__ void bar_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Arrives without waiting.
__device__ __forceinline__ void bar_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// As bar_sync(), and tells whether `x` is true in all of them.
__device__ __forceinline__ bool bar_and(int id, int threads, bool x) {
  unsigned d;
  asm volatile("{.reg .pred p, q; setp.ne.u32 p, %3, 0; bar.red.and.pred q, %1, %2, p; selp.u32 %0, 1, 0, q;}"
               : "=r"(d)
               : "r"(id), "r"(threads), "r"(static_cast<unsigned>(x))
               : "memory");
  return d != 0;
}

// All threads of the CTA: waits, and tells whether `x` is true in any of them.
__device__ __forceinline__ bool bar_or(bool x) {
  unsigned d;
  asm volatile("{.reg .pred p, q; setp.ne.u32 p, %1, 0; bar.red.or.pred q, 0, p; selp.u32 %0, 1, 0, q;}"
               : "=r"(d)
               : "r"(static_cast<unsigned>(x))
               : "memory");
  return d != 0;
}

}  // namespace fattn::ptx
