// How kernels of operations begin.
#pragma once

#include "kernels/ptx/dependent_launch.h"

namespace fattn::ops {

// kDependent: the kernel before may still run.
template <bool kDependent>
__device__ __forceinline__ void begin_kernel() {
  if constexpr (kDependent) {
    ptx::let_kernel_after_come_up();
    ptx::wait_for_kernel_before();
  }
}

}  // namespace fattn::ops
