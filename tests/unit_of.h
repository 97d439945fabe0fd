// What rounding to a dtype may change, as a share of the number: half a unit in the last place.
#pragma once

#include "fattn/types.hpp"

namespace fattn::test {

inline double unit_of(DType dtype) {
  return dtype == DType::kF32 ? 0x1p-24 : dtype == DType::kF16 ? 0x1p-11 : dtype == DType::kBF16 ? 0x1p-8 : 0x1p-53;
}

}  // namespace fattn::test
