// Merge, rotary embeddings and append: a call is checked, and computed by its backend.
#pragma once

#include "fattn/types.hpp"
#include "rows/kernels.h"

namespace fattn::core::rows {

// Throw Error.
void merge(const fattn_merge_problem& problem, bool backward);
void rotary(const fattn_rotary_problem& problem);
void append(const fattn_append_problem& problem);

// Of a problem whose tensors fit together. The rows of packed sequences are one batch entry.
struct RotarySizes {
  int64_t batch, seqlen, heads, positions;
  int headdim, half;  // half: pairs that turn
};

// The position of a row; -1: it belongs to none of the packed sequences. For lists in host memory.
int64_t position_of(const fattn_rotary_problem& problem, int64_t batch, int64_t row);

namespace reference {
void merge(const fattn_merge_problem& problem, const MergeSizes& sizes, bool backward);
void rotary(const fattn_rotary_problem& problem, const RotarySizes& sizes);
}  // namespace reference

namespace cpu {
void merge(const fattn_merge_problem& problem, const MergeSizes& sizes, bool backward);
void rotary(const fattn_rotary_problem& problem, const RotarySizes& sizes);
}  // namespace cpu

namespace cuda {
void merge(const fattn_merge_problem& problem, const MergeSizes& sizes, bool backward);
void rotary(const fattn_rotary_problem& problem, const RotarySizes& sizes);
}  // namespace cuda

}  // namespace fattn::core::rows
