// The greatest of what all threads of a CTA give, by way of shared memory.
#pragma once

#include "kernels/ptx/reduce_warp.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/special_registers.h"

namespace fattn::v2 {

// Two numbers, not negative; `slots` are 8 bytes of each warp. A barrier before the answer; the slots may be used again after one more.
template <int kWarps>
__device__ __forceinline__ float2 greatest_of_all(unsigned slots, float x, float y) {
  const auto [warp, lane] = ptx::thread_place();
  x = ptx::warp_max_nonnegative(x);
  y = ptx::warp_max_nonnegative(y);
  if (lane == 0) {
    ptx::st_shared_f32(slots + 8 * warp, x);
    ptx::st_shared_f32(slots + 8 * warp + 4, y);
  }
  __syncthreads();
  float2 greatest{0, 0};
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    greatest.x = fmaxf(greatest.x, ptx::ld_shared_f32(slots + 8 * i));
    greatest.y = fmaxf(greatest.y, ptx::ld_shared_f32(slots + 8 * i + 4));
  }
  return greatest;
}

}  // namespace fattn::v2
