// Special registers (PTX ISA, "Special Registers"), and a way to have what is cheap to compute computed again.
#pragma once

namespace fattn::ptx {

// The index of the warp in its CTA (one-dimensional CTAs), as a value that the compiler knows to be the same in all lanes.
__device__ __forceinline__ int warp_id() { return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0); }

// x, but the compiler does not know it: what follows from it is computed here and now, not kept in registers since before.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ unsigned opaque(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}

// 0, which the compiler takes for a number of each lane's own.
__device__ __forceinline__ unsigned zero_of_lane() {
  unsigned d;
  asm volatile("{.reg .b32 m; mov.u32 m, %%lanemask_eq; popc.b32 m, m; add.u32 %0, m, -1;}" : "=r"(d));
  return d;
}

// Which thread this is in a one-dimensional CTA. Found again at each call, to keep registers free.
struct ThreadPlace {
  int warp, lane;
};
__device__ __forceinline__ ThreadPlace thread_place() {
  const int thread = opaque(static_cast<int>(threadIdx.x));
  return {__shfl_sync(0xffffffffu, thread / 32, 0), thread % 32};
}

}  // namespace fattn::ptx
