// Numbers between float and the tensors' dtypes, and the inputs of a measurement.
#pragma once

#include <cstdint>

#include "fattn/types.hpp"
#include "measure/memory.h"
#include "measure/problem.h"
#include "measure/score_terms.h"

namespace fattn::measure {

// Rounds to nearest, ties to even.
uint16_t to_bf16(float value);
uint16_t to_fp16(float value);
double from_bf16(uint16_t bits);
double from_fp16(uint16_t bits);

double load(const void* data, DType dtype, int64_t index);

// N(0, 1), the same numbers for the same seed and stream on every machine and, up to rounding, in every dtype.
void fill_normal(void* data, DType dtype, int64_t count, uint64_t seed, uint64_t stream);

// q, k, v, what scores depend on and, for gradients, dout.
struct Inputs {
  Pages q, k, v, dout;
  ScorePages scores;
};
Inputs make_inputs(const ProblemSpec& spec, bool grad);

// The largest absolute difference; infinity if a number on either side is not finite.
double max_difference(const void* a, const void* b, DType dtype, int64_t count);
bool all_finite(const void* data, DType dtype, int64_t count);

}  // namespace fattn::measure
