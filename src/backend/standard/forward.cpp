// Forward pass of algorithm standard.
#include <limits>

#include "backend/standard/matrices.h"
#include "backend/standard/passes.h"
#include "shared/trace.h"

namespace fattn::core {
namespace {

// s = scale q k^T, stored in the matrix.
template <class E>
void score_rows(const StandardCall& call, const E* q, const E* k, int64_t rows, E* matrix, float* scratch) {
  const Traced traced("s = q k^T");
  const Problem& p = call.p;
  const Layout& at = call.at;
  const Scale scale(p.softmax_scale);
  const Matrix left = matrix_of(q, p.q.row, rows, p.headdim, scratch + at.block[0]);
  for (int64_t key = 0; key < p.seqlen_k; key += at.tile_k) {
    const int64_t keys = std::min(at.tile_k, p.seqlen_k - key);
    const Matrix right = matrix_of(k + key * p.k.row, p.k.row, keys, p.headdim, scratch + at.tile[0]);
    OutputRows<E> s(matrix + key, p.seqlen_k, rows, keys, scratch + at.scores[0]);
    multiply(call.blas, Side::kPlain, Side::kTransposed, rows, keys, p.headdim, scale.product, left, right, 0.0f, s.data, s.ld);
    scale.finish(s.data, s.ld, rows, keys);
    s.finish();
  }
}

// p = softmax(s) in place, for the rows from `first_row` on.
template <class E>
void softmax_rows(const StandardCall& call, int64_t first_row, int64_t rows, E* matrix, float* lse, float* scratch) {
  const Traced traced("p = softmax(s)");
  const Problem& p = call.p;
  for (int64_t r = 0; r < rows; ++r) {
    E* weights = matrix + r * p.seqlen_k;
    const int64_t visible = p.mask().visible_end(first_row + r);
    float* scores;
    if constexpr (std::is_same_v<E, float>) {
      scores = weights;
    } else {
      scores = scratch + call.at.score_row;
      row_passes<E>().load(weights, scores, visible);
    }
    lse[r] = row_passes<E>().softmax(scores, weights, visible, p.seqlen_k);
  }
}

// o = p v
template <class E>
void output_rows(const StandardCall& call, int64_t first_row, int64_t rows, const E* matrix, const E* v, const float* lse, void* o, float* scratch) {
  const Traced traced("o = p v");
  const Problem& p = call.p;
  const Layout& at = call.at;
  OutputRows<E> out(o, p.o.row, rows, p.headdim_v, scratch + at.output[0], p.out_dtype() == DType::kF32);
  if (p.seqlen_k == 0) out.clear();
  // Keys that a row sees, none if its scores are all -inf.
  const auto seen_by = [&](int64_t r) -> int64_t {
    return lse[r] == -std::numeric_limits<float>::infinity() ? 0 : p.mask().visible_end(first_row + r);
  };
  int64_t seen_by_all = p.seqlen_k;
  for (int64_t r = 0; r < rows; ++r) seen_by_all = std::min(seen_by_all, seen_by(r));
  for (int64_t key = 0; key < p.seqlen_k; key += at.tile_k) {
    const int64_t keys = std::min(at.tile_k, p.seqlen_k - key);
    const Matrix left = matrix_of(matrix + key, p.seqlen_k, rows, keys, scratch + at.scores[0]);
    Matrix right = matrix_of(v + key * p.v.row, p.v.row, keys, p.headdim_v, scratch + at.tile[0]);
    const auto all_see = [&](int64_t j) { return key + j < seen_by_all; };
    const bool taken = take_out_nonfinite(right, keys, p.headdim_v, scratch + at.tile[0], all_see);
    multiply(call.blas, Side::kPlain, Side::kPlain, rows, p.headdim_v, keys, 1.0f, left, right, key == 0 ? 0.0f : 1.0f, out.data, out.ld);
    if (taken)
      add_nonfinite(
          v + key * p.v.row, p.v.row, keys, p.headdim_v, scratch + at.line, out, rows, all_see,
          [&](int64_t j, int64_t r) { return key + j < seen_by(r); }, [&](int64_t j, int64_t r) { return left.data[r * left.ld + j]; });
  }
  out.finish();
}

}  // namespace

template <class E>
void standard_forward_rows(const StandardCall& call, int64_t task, float* scratch) {
  const Problem& p = call.p;
  const int64_t blocks = call.at.row_tasks / (p.batch * p.nheads);
  const int64_t b = task / blocks / p.nheads, h = task / blocks % p.nheads, row = task % blocks * call.at.block_q;
  const int64_t rows = std::min(call.at.block_q, p.seqlen_q - row);
  const int64_t hk = h / p.group();
  const E* q = at_offset<const E>(call.buffers.q, b * p.q.batch + h * p.q.head + row * p.q.row);
  const E* k = at_offset<const E>(call.buffers.k, b * p.k.batch + hk * p.k.head);
  const E* v = at_offset<const E>(call.buffers.v, b * p.v.batch + hk * p.v.head);
  void* o = output_at(p, call.buffers.o, b * p.o.batch + h * p.o.head + row * p.o.row);
  E* matrix = call.head_matrix<E>(call.at.weights, b, h) + row * p.seqlen_k;
  float* lse = scratch + call.at.row_values;

  score_rows(call, q, k, rows, matrix, scratch);
  softmax_rows(call, row, rows, matrix, lse, scratch);
  output_rows(call, row, rows, matrix, v, lse, o, scratch);

  if (p.want_lse)
    for (int64_t r = 0; r < rows; ++r) static_cast<float*>(call.buffers.lse)[b * p.lse.batch + h * p.lse.head + (row + r) * p.lse.row] = lse[r];
  if (p.want_weights) {
    const int64_t* s = p.weights_strides;
    E* weights = at_offset<E>(call.buffers.weights, b * s[0] + h * s[1] + row * s[2]);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t j = 0; j < p.seqlen_k; ++j) weights[r * s[2] + j * s[3]] = matrix[r * p.seqlen_k + j];
  }
}

template void standard_forward_rows<float>(const StandardCall&, int64_t, float*);
template void standard_forward_rows<Half>(const StandardCall&, int64_t, float*);
template void standard_forward_rows<Brain>(const StandardCall&, int64_t, float*);

}  // namespace fattn::core
