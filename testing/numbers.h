// The number formats as arithmetic on float64, written apart from the library's own conversions so that each can check
// the other.
#pragma once

#include <cstdint>

#include "fattn/types.hpp"

namespace fattn::testing {

// `x` rounded once to the format, to nearest even; beyond the largest finite number: infinity. NaN stays NaN.
double round_to(DType dtype, double x);

// Rows whose lse is lower have no gradient (docs/NUMERICS.md).
inline constexpr double kLowestLse = -33554432;  // -2^25

// One unit in the last place of the format at |x|; the smallest subnormal at 0.
double ulp(DType dtype, double x);

// Element `i` of an array of the format.
double load(DType dtype, const void* array, int64_t i);
void store(DType dtype, void* array, int64_t i, double x);  // rounds

}  // namespace fattn::testing
