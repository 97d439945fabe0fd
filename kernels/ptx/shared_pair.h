// Two neighbouring floats of shared memory in one load or store. PTX ISA, ld, st.
#pragma once

namespace fattn::ptx {

__device__ __forceinline__ float2 ld_shared_f32x2(unsigned address) {
  float2 d;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(d.x), "=f"(d.y) : "r"(address) : "memory");
  return d;
}

__device__ __forceinline__ void st_shared_f32x2(unsigned address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

}  // namespace fattn::ptx
