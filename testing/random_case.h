// Everything that a score may depend on, in random combinations.
#pragma once

#include <cstdint>

#include "testing/cases.h"

namespace fattn::testing {

// The n-th of a sequence of cases: small ones, with lengths around those of vectors, blocks of random numbers and tiles. Its name says what it has.
Case random_case(DType dtype, uint64_t n, int64_t most_headdim = 48);

}  // namespace fattn::testing
