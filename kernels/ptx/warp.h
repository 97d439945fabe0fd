// Exchange and votes inside a warp, all 32 lanes taking part.
// PTX ISA, "Data Movement and Conversion Instructions: shfl.sync", "Parallel Synchronization and Communication Instructions: vote.sync,
// redux.sync, bar.warp.sync".
#pragma once

namespace fattn::ptx {

__device__ __forceinline__ float shfl_xor(float x, int lane_mask) {
  float d;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=f"(d) : "f"(x), "r"(lane_mask));
  return d;
}

__device__ __forceinline__ unsigned shfl_xor(unsigned x, int lane_mask) {
  unsigned d;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(d) : "r"(x), "r"(lane_mask));
  return d;
}

__device__ __forceinline__ unsigned shfl(unsigned x, int lane) {
  unsigned d;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(d) : "r"(x), "r"(lane));
  return d;
}

__device__ __forceinline__ float shfl(float x, int lane) { return __uint_as_float(shfl(__float_as_uint(x), lane)); }

__device__ __forceinline__ bool vote_all(bool x) {
  unsigned d;
  asm volatile("{.reg .pred p, q; setp.ne.u32 p, %1, 0; vote.sync.all.pred q, p, 0xffffffff; selp.u32 %0, 1, 0, q;}"
               : "=r"(d)
               : "r"(static_cast<unsigned>(x)));
  return d != 0;
}

// Bit i: x of lane i.
__device__ __forceinline__ unsigned ballot(bool x) {
  unsigned d;
  asm volatile("{.reg .pred p; setp.ne.u32 p, %1, 0; vote.sync.ballot.b32 %0, p, 0xffffffff;}" : "=r"(d) : "r"(static_cast<unsigned>(x)));
  return d;
}

// x, which is the same in all lanes, so that the compiler knows: what is computed from it then takes uniform registers. sm_80 and later.
__device__ __forceinline__ int uniform(int x) {
  int d;
  asm volatile("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(d) : "r"(x));
  return d;
}

template <class T>
__device__ __forceinline__ const T* uniform(const T* x) {
  const auto bits = reinterpret_cast<unsigned long long>(x);
  const auto low = static_cast<unsigned>(uniform(static_cast<int>(bits))), high = static_cast<unsigned>(uniform(static_cast<int>(bits >> 32)));
  return reinterpret_cast<const T*>(static_cast<unsigned long long>(high) << 32 | low);
}

__device__ __forceinline__ void warp_sync() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }

}  // namespace fattn::ptx
