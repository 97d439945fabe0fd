// Tensors as BLAS sees them: fp32 matrices, in place where that is possible and through a copy where it is not.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "backend/standard/layout.h"
#include "backend/standard/row_passes.h"
#include "cpu/openblas.h"

namespace fattn::core {

struct Matrix {
  const float* data;
  int ld;
};

// `count` rows of `width` elements. `copy` has room for them, if a copy is needed.
template <class E>
Matrix matrix_of(const E* rows, int64_t stride, int64_t count, int64_t width, float* copy) {
  if constexpr (std::is_same_v<E, float>)
    if (blas_can_use(stride, count, width)) return {rows, static_cast<int>(count <= 1 ? width : stride)};
  for (int64_t r = 0; r < count; ++r) row_passes<E>().load(rows + r * stride, copy + r * width, width);
  return {copy, static_cast<int>(width)};
}

// Rows of an output. BLAS writes `data`; finish() takes a copy to its place.
template <class E>
class OutputRows {
 public:
  // `fp32`: the rows are, whatever E.
  OutputRows(void* rows, int64_t stride, int64_t count, int64_t width, float* copy, bool fp32 = std::is_same_v<E, float>)
      : rows_(rows), stride_(stride), count_(count), width_(width), fp32_(fp32) {
    data = copy;
    ld = static_cast<int>(width);
    if (!fp32 || !blas_can_use(stride, count, width)) return;
    data = static_cast<float*>(rows);
    if (count > 1) ld = static_cast<int>(stride);
  }
  float* row(int64_t r) const { return data + r * ld; }
  void clear() {
    for (int64_t r = 0; r < count_; ++r) std::fill_n(row(r), width_, 0.0f);
  }
  void finish() const {
    if (data == rows_) return;
    for (int64_t r = 0; r < count_; ++r) {
      if (fp32_)
        row_passes<float>().store(row(r), static_cast<float*>(rows_) + r * stride_, width_);
      else
        row_passes<E>().store(row(r), static_cast<E*>(rows_) + r * stride_, width_);
    }
  }

  float* data;
  int ld;

 private:
  void* rows_;
  int64_t stride_, count_, width_;
  bool fp32_;
};

inline bool all_finite(const float* row, int64_t n) {
  float zeros = 0;
  for (int64_t j = 0; j < n; ++j) zeros += row[j] - row[j];
  return zeros == 0;
}

enum class Side { kPlain = 111, kTransposed = 112 };  // CBLAS's CblasNoTrans and CblasTrans

// c (m, n) = alpha a b + beta c, row-major; a is stored (k, m) and b (n, k) where they are transposed. m, n, k >= 1.
inline void multiply(const OpenBlas& blas, Side side_a, Side side_b, int64_t m, int64_t n, int64_t k, float alpha, Matrix a, Matrix b, float beta,
                     float* c, int ldc) {
  constexpr int kRowMajor = 101;
  blas.sgemm(kRowMajor, static_cast<int>(side_a), static_cast<int>(side_b), static_cast<int>(m), static_cast<int>(n), static_cast<int>(k), alpha,
             a.data, a.ld, b.data, b.ld, beta, c, ldc);
}

// BLAS does not look at its operands when alpha is 0, and a NaN in them would be lost. So a scale of 0 is applied after.
struct Scale {
  explicit Scale(double softmax_scale) {
    const auto scale = static_cast<float>(softmax_scale);
    product = scale == 0.0f ? 1.0f : scale;
    after = scale == 0.0f ? 0.0f : 1.0f;
  }
  // The rest of the scale, on a product of (rows, width).
  void finish(float* data, int64_t ld, int64_t rows, int64_t width) const {
    if (after == 1.0f) return;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t j = 0; j < width; ++j) data[r * ld + j] *= after;
  }
  float product, after;
};

// Takes Inf and NaN out of those of n rows that not all outputs of a product count, whose weights are 0 there: 0 * Inf is NaN. `copy` has room for
// the rows. Returns whether there were any.
template <class All>
bool take_out_nonfinite(Matrix& rows, int64_t n, int64_t width, float* copy, const All& all_count) {
  bool any = false;
  for (int64_t i = 0; i < n && !any; ++i) any = !all_count(i) && !all_finite(rows.data + i * rows.ld, width);
  if (!any) return false;
  if (rows.data != copy)
    for (int64_t i = 0; i < n; ++i) std::copy_n(rows.data + i * rows.ld, width, copy + i * width);
  rows = {copy, static_cast<int>(width)};
  for (int64_t i = 0; i < n; ++i)
    if (!all_count(i))
      std::transform(copy + i * width, copy + (i + 1) * width, copy + i * width, [](float x) { return std::isfinite(x) ? x : 0.0f; });
  return true;
}

// Adds what was taken out to the outputs that count it: counts(i, r) and weight(i, r) are of row i and output r. `line` is scratch of the width.
template <class E, class All, class Counts, class Weight>
void add_nonfinite(const E* rows, int64_t stride, int64_t n, int64_t width, float* line, OutputRows<E>& out, int64_t outputs, const All& all_count,
                   const Counts& counts, const Weight& weight) {
  bool is_nan[kMostOutputs] = {};  // wholly: nothing changes it any more
  for (int64_t i = 0; i < n; ++i) {
    if (all_count(i)) continue;
    row_passes<E>().load(rows + i * stride, line, width);
    if (all_finite(line, width)) continue;
    const bool makes_nan = std::all_of(line, line + width, [](float x) { return std::isnan(x); });
    std::transform(line, line + width, line, [](float x) { return std::isfinite(x) ? 0.0f : x; });
    for (int64_t r = 0; r < outputs; ++r) {
      if (is_nan[r] || !counts(i, r)) continue;
      row_passes<E>().add(weight(i, r), line, out.row(r), width);
      is_nan[r] = makes_nan;
    }
  }
}

}  // namespace fattn::core
