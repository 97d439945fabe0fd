// What a score depends on beside q and k: the tensors and options of a description that say it, checked and stored.
#pragma once

#include "problem/problem.h"

namespace fattn::core {

void set_scores(const fattn_problem& given, Problem& problem);

// lse, dlse.
Strides lse_strides(const char* name, const fattn_tensor& tensor, const fattn_tensor& q, const Problem& problem, bool output);

// Sums of two lengths and a limit stay numbers.
void check_lengths(const Problem& problem, const char* with, int64_t most, const char* most_text);

}  // namespace fattn::core
