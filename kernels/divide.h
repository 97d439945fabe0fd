// Division by a number that the host knew before.
#pragma once

#include "device_abi/divisor.h"

namespace fattn {

__device__ __forceinline__ int divide(int x, const Divisor& by) {
  return static_cast<int>(__umulhi(2 * static_cast<unsigned>(x), by.factor) >> by.shift);
}

}  // namespace fattn
