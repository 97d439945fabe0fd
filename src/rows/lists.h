// Lists in host memory that say something of each sequence: a number, or where packed sequences begin.
#pragma once

#include "problem/tensor_checks.h"
#include "rows/checks.h"
#include "shared/text.h"

namespace fattn::core::rows {

// Of int32 or int64.
inline int64_t number_at(const fattn_tensor& list, int64_t i) {
  const int64_t at = i * list.strides[0];
  return list.dtype == FATTN_I64 ? static_cast<const int64_t*>(list.data)[at] : static_cast<const int32_t*>(list.data)[at];
}

// Which of the packed sequences has a row: the first that ends behind it; as many as there are: none has.
inline int64_t sequence_of(const fattn_tensor& cu_seqlens, int64_t row) {
  int64_t low = 0, high = cu_seqlens.shape[0] - 1;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (number_at(cu_seqlens, middle + 1) > row)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

// Of one dimension: where it is and what it points to.
void check_list(const char* name, const fattn_tensor& list, const char* dimensions, const char* first_name, const fattn_tensor& first);
// int32 or int64.
void check_index_dtype(const char* name, const fattn_tensor& list);
// (batch + 1), int32: where packed sequences begin.
void check_cu_seqlens(const char* name, const fattn_tensor& list, const char* first_name, const fattn_tensor& first);
// Its numbers, for the rows of `of`.
void check_cu_seqlens_values(const char* name, const fattn_tensor& list, const char* of, int64_t rows);

}  // namespace fattn::core::rows
