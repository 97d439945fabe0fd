// Shared memory by its 32-bit address. PTX ISA, "Data Movement and Conversion Instructions: cvta, ld, st".
#pragma once

namespace fattn::ptx {

__device__ __forceinline__ unsigned shared_address(const void* pointer) { return static_cast<unsigned>(__cvta_generic_to_shared(pointer)); }

__device__ __forceinline__ uint4 ld_shared_16(unsigned address) {
  uint4 d;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w) : "r"(address) : "memory");
  return d;
}

__device__ __forceinline__ uint2 ld_shared_8(unsigned address) {
  uint2 d;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(d.x), "=r"(d.y) : "r"(address) : "memory");
  return d;
}

__device__ __forceinline__ unsigned ld_shared_4(unsigned address) {
  unsigned d;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(d) : "r"(address) : "memory");
  return d;
}

// Of a word that another warp may be writing: read anew at each call. ptxas takes an ordinary load out of a loop that waits for a change.
__device__ __forceinline__ unsigned ld_shared_volatile_4(unsigned address) {
  unsigned d;
  asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(d) : "r"(address) : "memory");
  return d;
}
__device__ __forceinline__ void red_or_shared(unsigned address, unsigned bits) {
  asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(address), "r"(bits) : "memory");
}

__device__ __forceinline__ float ld_shared_f32(unsigned address) {
  float d;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(d) : "r"(address) : "memory");
  return d;
}

__device__ __forceinline__ unsigned short ld_shared_2(unsigned address) {
  unsigned short d;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(d) : "r"(address) : "memory");
  return d;
}

__device__ __forceinline__ unsigned ld_shared_1(unsigned address) {
  unsigned d;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(d) : "r"(address) : "memory");
  return d;
}

__device__ __forceinline__ void st_shared_16(unsigned address, uint4 x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

__device__ __forceinline__ void st_shared_8(unsigned address, uint2 x) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(x.x), "r"(x.y) : "memory");
}

__device__ __forceinline__ void st_shared_4(unsigned address, unsigned x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

__device__ __forceinline__ void st_shared_2(unsigned address, unsigned short x) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(x) : "memory");
}

__device__ __forceinline__ void st_shared_1(unsigned address, unsigned x) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

__device__ __forceinline__ void st_shared_f32(unsigned address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

// Atomic.
__device__ __forceinline__ void or_shared(unsigned address, unsigned x) {
  asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
__device__ __forceinline__ void min_shared(unsigned address, int x) {
  asm volatile("red.shared.min.s32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
__device__ __forceinline__ void max_shared(unsigned address, int x) {
  asm volatile("red.shared.max.s32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

}  // namespace fattn::ptx
