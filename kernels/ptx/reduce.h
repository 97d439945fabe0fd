// Additions to global memory without a result. PTX ISA, "Parallel Synchronization and Communication Instructions: red".
#pragma once

namespace fattn::ptx {

__device__ __forceinline__ void red_add(float* address, float x) { asm volatile("red.global.add.f32 [%0], %1;" ::"l"(address), "f"(x) : "memory"); }

// Two neighbours, 8-byte aligned: one instruction from sm_90, two before.
__device__ __forceinline__ void red_add2(float* address, float x, float y) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(address), "f"(x), "f"(y) : "memory");
#else
  red_add(address, x);
  red_add(address + 1, y);
#endif
}

// Four neighbours, 16-byte aligned: one instruction from sm_90, four before.
__device__ __forceinline__ void red_add4(float* address, float x, float y, float z, float w) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
#else
  red_add(address, x);
  red_add(address + 1, y);
  red_add(address + 2, z);
  red_add(address + 3, w);
#endif
}

}  // namespace fattn::ptx
