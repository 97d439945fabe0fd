// Additions to global memory that return nothing. PTX ISA, "Parallel Synchronization and Communication Instructions: red"; of vectors: sm_90 and
// later.
#pragma once

namespace fattn::ptx {

// Adds four floats, at a multiple of 16 bytes.
__device__ __forceinline__ void red_add_f32x4(float* to, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

}  // namespace fattn::ptx
