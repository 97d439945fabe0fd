// Flags in global memory by which CTAs wait for each other. PTX ISA, "Memory Consistency Model", ld.acquire, red.release, atom.
#pragma once

namespace fattn::ptx {

__device__ __forceinline__ int ld_acquire(const int* address) {
  int d;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(d) : "l"(address) : "memory");
  return d;
}

__device__ __forceinline__ void red_add_release(int* address, int x) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(address), "r"(x) : "memory");
}

__device__ __forceinline__ int atomic_add(int* address, int x) {
  int d;
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], %2;" : "=r"(d) : "l"(address), "r"(x) : "memory");
  return d;
}

}  // namespace fattn::ptx
