// What a merge, rotary embeddings and an append are for their backends: checked problems, and the rows of a task. Units of other instruction sets
// than the plainest include this too, so it has no code of the standard library.
#pragma once

#include <stdint.h>

#include "fattn/fattn.h"

namespace fattn::core::rows {

constexpr int kMostHeaddim = 576;  // as of attention

// Elements between batch entries, rows and heads; of packed sequences all rows are one entry's.
struct Places {
  int64_t batch, row, head;
};
static inline Places places_of_rows(const fattn_tensor& t) {
  return t.ndim == 4 ? Places{t.strides[0], t.strides[1], t.strides[2]} : Places{0, t.strides[0], t.strides[1]};
}
static inline Places places_of_lse(const fattn_tensor& t) {
  return t.ndim == 3 ? Places{t.strides[0], t.strides[2], t.strides[1]} : Places{0, t.strides[1], t.strides[0]};
}

// A row of one head.
struct Row {
  int64_t batch, row, head;
};
static inline int64_t offset_of(const Places& s, const Row& r) { return r.batch * s.batch + r.row * s.row + r.head * s.head; }

// Of a problem whose tensors fit together.
struct MergeSizes {
  int64_t batch, seqlen, heads;
  int headdim;
};
static inline Row row_of(const MergeSizes& s, int64_t i) { return {i / s.heads / s.seqlen, i / s.heads % s.seqlen, i % s.heads}; }

// Rows [begin, end) of all, heads side by side.
struct MergeTask {
  const fattn_merge_problem* problem;
  MergeSizes sizes;
  int64_t begin, end;
};

// A row of all heads. `x` and `y` are at its first head; `y` may be `x`. `cos` and `sin` are at its position.
struct RotaryRow {
  const void* x;
  void* y;
  const void *cos, *sin;
  int64_t x_head_stride, y_head_stride, heads;
  int headdim, half;                             // half: pairs that turn
  int32_t dtype, y_dtype, cos_dtype, sin_dtype;  // FATTN_F32, FATTN_F16, FATTN_BF16
  bool interleaved, inverse;
};

struct RowKernels {
  void (*merge)(const MergeTask&);
  void (*merge_backward)(const MergeTask&);
  void (*rotary)(const RotaryRow&);
};

// One a translation unit.
const RowKernels* row_kernels_scalar();
const RowKernels* row_kernels_avx2();
const RowKernels* row_kernels_avx512();
const RowKernels* row_kernels_neon();

}  // namespace fattn::core::rows
