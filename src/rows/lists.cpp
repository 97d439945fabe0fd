#include "rows/lists.h"

namespace fattn::core::rows {

void check_list(const char* name, const fattn_tensor& list, const char* dimensions, const char* first_name, const fattn_tensor& first) {
  check_view(name, list, 1, dimensions, false);
  check_device(name, list, first_name, first);
  check_memory(name, list);
}

void check_index_dtype(const char* name, const fattn_tensor& list) {
  if (list.dtype != FATTN_I32 && list.dtype != FATTN_I64)
    invalid(text(name, " has the dtype ", dtype_text(list), "; allowed: int32 (", FATTN_I32, "), int64 (", FATTN_I64, ")"));
}

void check_cu_seqlens(const char* name, const fattn_tensor& list, const char* first_name, const fattn_tensor& first) {
  check_dtype(name, list, FATTN_I32, "");
  check_list(name, list, "(batch + 1)", first_name, first);
  if (list.shape[0] < 1 || list.shape[0] > int64_t{1} << 30)
    invalid(text(name, " has the shape ", shape_text(list), "; it has batch + 1 elements, allowed: 1 to 2^30"));
}

void check_cu_seqlens_values(const char* name, const fattn_tensor& list, const char* of, int64_t rows) {
  if (number_at(list, 0) != 0) invalid(text(name, "[0] is ", number_at(list, 0), "; it must be 0"));
  for (int64_t n = 1; n < list.shape[0]; ++n) {
    const int64_t begin = number_at(list, n - 1), end = number_at(list, n);
    if (end < begin || end > rows)
      invalid(text(name, "[", n, "] is ", end, "; allowed: ", begin, ", where its sequence begins, to ", rows, ", the rows of ", of));
  }
}

}  // namespace fattn::core::rows
