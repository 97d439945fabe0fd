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

}  // namespace fattn::ptx
