// In place of kernels/ptx/warp.h where the host runs device code.
#pragma once

#include "tests/emulated/device.h"

namespace fattn::ptx {

inline void warp_sync() { emulated::warp->meet(); }

inline float shfl_xor(float x, int lane_mask) {
  const unsigned lane = threadIdx.x % 32;
  emulated::warp->exchanged[lane] = x;
  warp_sync();
  const float other = emulated::warp->exchanged[lane ^ static_cast<unsigned>(lane_mask)];
  warp_sync();
  return other;
}

inline unsigned shfl_xor(unsigned x, int lane_mask) { return __float_as_uint(shfl_xor(__uint_as_float(x), lane_mask)); }

inline unsigned shfl(unsigned x, int lane) {
  emulated::warp->exchanged[threadIdx.x % 32] = __uint_as_float(x);
  warp_sync();
  const float of_lane = emulated::warp->exchanged[lane];
  warp_sync();
  return __float_as_uint(of_lane);
}

// Bit i: x of lane i.
inline unsigned ballot(bool x) {
  emulated::warp->exchanged[threadIdx.x % 32] = x ? 1.0f : 0.0f;
  warp_sync();
  unsigned bits = 0;
  for (unsigned lane = 0; lane < 32; ++lane) bits |= emulated::warp->exchanged[lane] != 0 ? 1u << lane : 0u;
  warp_sync();
  return bits;
}

inline bool vote_all(bool x) {
  emulated::warp->exchanged[threadIdx.x % 32] = x ? 1.0f : 0.0f;
  warp_sync();
  bool all = true;
  for (const float each : emulated::warp->exchanged) all = all && each != 0;
  warp_sync();
  return all;
}

}  // namespace fattn::ptx
