// Backward pass of algorithm standard (Dao 2022, appendix B, with the matrices in memory).
#include "backend/standard/matrices.h"
#include "backend/standard/passes.h"
#include "device_abi/lowest.h"
#include "shared/trace.h"

namespace fattn::core {
namespace {

// delta = rowsum(o dout) - dlse; of a row without a gradient dlse (null: absent) is not looked at.
template <class E>
void delta_rows(const Problem& p, const E* o, Matrix dout, const float* lse, const float* dlse, int64_t rows, float* line, float* delta) {
  const Traced traced("delta = rowsum(o dout)");
  for (int64_t r = 0; r < rows; ++r) {
    row_passes<E>().load(o + r * p.o.row, line, p.headdim_v);
    const float* dout_row = dout.data + r * dout.ld;
    double sum = 0;
    for (int64_t d = 0; d < p.headdim_v; ++d) sum += static_cast<double>(line[d]) * static_cast<double>(dout_row[d]);
    if (dlse && !(lse[r * p.lse.row] < kLowestLse)) sum -= static_cast<double>(dlse[r * p.dlse.row]);
    delta[r] = static_cast<float>(sum);
  }
}

}  // namespace

template <class E>
void standard_backward_rows(const StandardCall& call, int64_t task, float* scratch) {
  const Problem& p = call.p;
  const Layout& at = call.at;
  const int64_t blocks = at.row_tasks / (p.batch * p.nheads);
  const int64_t b = task / blocks / p.nheads, h = task / blocks % p.nheads, row = task % blocks * at.block_q;
  const int64_t rows = std::min(at.block_q, p.seqlen_q - row);
  const int64_t hk = h / p.group();
  const E* q = at_offset<const E>(call.buffers.q, b * p.q.batch + h * p.q.head + row * p.q.row);
  const E* k = at_offset<const E>(call.buffers.k, b * p.k.batch + hk * p.k.head);
  const E* v = at_offset<const E>(call.buffers.v, b * p.v.batch + hk * p.v.head);
  const E* o = at_offset<const E>(call.buffers.o, b * p.o.batch + h * p.o.head + row * p.o.row);
  const E* dout = at_offset<const E>(call.buffers.dout, b * p.dout.batch + h * p.dout.head + row * p.dout.row);
  const float* lse = at_offset<const float>(call.buffers.lse, b * p.lse.batch + h * p.lse.head + row * p.lse.row);
  void* dq = output_at(p, call.buffers.dq, b * p.dq.batch + h * p.dq.head + row * p.dq.row);
  E* weights = call.head_matrix<E>(at.weights, b, h) + row * p.seqlen_k;
  E* dscores = call.head_matrix<E>(at.dscores, b, h) + row * p.seqlen_k;
  float* delta = scratch + at.row_values;
  float* line = scratch + at.line;

  const Scale scale(p.softmax_scale);
  const Matrix q_rows = matrix_of(q, p.q.row, rows, p.headdim, scratch + at.block[0]);
  const Matrix dout_rows = matrix_of(dout, p.dout.row, rows, p.headdim_v, scratch + at.block[1]);
  const float* dlse = p.has_dlse ? at_offset<const float>(call.buffers.dlse, b * p.dlse.batch + h * p.dlse.head + row * p.dlse.row) : nullptr;
  delta_rows(p, o, dout_rows, lse, dlse, rows, line, delta);
  OutputRows<E> out(dq, p.dq.row, rows, p.headdim, scratch + at.output[0], p.out_dtype() == DType::kF32);
  if (p.seqlen_k == 0) out.clear();
  const auto seen_by = [&](int64_t r) -> int64_t { return lse[r * p.lse.row] < kLowestLse ? 0 : p.mask().visible_end(row + r); };
  int64_t seen_by_all = p.seqlen_k;
  for (int64_t r = 0; r < rows; ++r) seen_by_all = std::min(seen_by_all, seen_by(r));

  for (int64_t key = 0; key < p.seqlen_k; key += at.tile_k) {
    const int64_t keys = std::min(at.tile_k, p.seqlen_k - key);
    Matrix k_rows = matrix_of(k + key * p.k.row, p.k.row, keys, p.headdim, scratch + at.tile[0]);
    const Matrix v_rows = matrix_of(v + key * p.v.row, p.v.row, keys, p.headdim_v, scratch + at.tile[1]);
    // s = scale q k^T; dp = dout v^T. The softmax's gradient turns them into p and ds.
    OutputRows<E> s(weights + key, p.seqlen_k, rows, keys, scratch + at.scores[0]);
    OutputRows<E> dp(dscores + key, p.seqlen_k, rows, keys, scratch + at.scores[1]);
    {
      const Traced traced("s = q k^T");
      multiply(call.blas, Side::kPlain, Side::kTransposed, rows, keys, p.headdim, scale.product, q_rows, k_rows, 0.0f, s.data, s.ld);
      scale.finish(s.data, s.ld, rows, keys);
    }
    {
      const Traced traced("dp = dout v^T");
      multiply(call.blas, Side::kPlain, Side::kTransposed, rows, keys, p.headdim_v, 1.0f, dout_rows, v_rows, 0.0f, dp.data, dp.ld);
    }
    {
      const Traced traced("gradient of softmax");
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t visible = std::clamp<int64_t>(p.mask().visible_end(row + r) - key, 0, keys);
        row_passes<E>().gradient(s.row(r), dp.row(r), weights + r * p.seqlen_k + key, dscores + r * p.seqlen_k + key, visible, keys,
                                 lse[r * p.lse.row], delta[r], scale.after);
      }
    }
    const Traced traced("dq = ds k");
    const auto all_see = [&](int64_t j) { return key + j < seen_by_all; };
    const bool taken = take_out_nonfinite(k_rows, keys, p.headdim, scratch + at.tile[0], all_see);
    multiply(call.blas, Side::kPlain, Side::kPlain, rows, p.headdim, keys, scale.product, {dp.data, dp.ld}, k_rows, key == 0 ? 0.0f : 1.0f, out.data,
             out.ld);
    if (taken)
      add_nonfinite(
          k + key * p.k.row, p.k.row, keys, p.headdim, line, out, rows, all_see, [&](int64_t j, int64_t r) { return key + j < seen_by(r); },
          [&](int64_t j, int64_t r) { return scale.product * dp.data[r * dp.ld + j]; });
  }
  out.finish();
}

template <class E>
void standard_backward_keys(const StandardCall& call, int64_t task, float* scratch) {
  const Problem& p = call.p;
  const Layout& at = call.at;
  const int64_t blocks = at.key_tasks / (p.batch * p.nheads_k);
  const int64_t b = task / blocks / p.nheads_k, hk = task / blocks % p.nheads_k, key = task % blocks * at.block_k;
  const int64_t keys = std::min(at.block_k, p.seqlen_k - key);
  const int64_t first_head = hk * p.group(), end_head = first_head + p.group();
  const E* q_batch = at_offset<const E>(call.buffers.q, b * p.q.batch);
  const E* dout_batch = at_offset<const E>(call.buffers.dout, b * p.dout.batch);
  const float* lse_batch = at_offset<const float>(call.buffers.lse, b * p.lse.batch);
  const bool fp32 = p.out_dtype() == DType::kF32;
  OutputRows<E> dk(output_at(p, call.buffers.dk, b * p.dk.batch + hk * p.dk.head + key * p.dk.row), p.dk.row, keys, p.headdim, scratch + at.output[0],
                   fp32);
  OutputRows<E> dv(output_at(p, call.buffers.dv, b * p.dv.batch + hk * p.dv.head + key * p.dv.row), p.dv.row, keys, p.headdim_v,
                   scratch + at.output[1], fp32);
  if (p.seqlen_q == 0) {
    dk.clear();
    dv.clear();
  }

  const Scale scale(p.softmax_scale);
  float* line = scratch + at.line;
  float beta = 0.0f;  // the first product sets, the others add
  for (int64_t h = first_head; h < end_head; ++h)
    for (int64_t row = 0; row < p.seqlen_q; row += at.tile_q) {
      const int64_t rows = std::min(at.tile_q, p.seqlen_q - row);
      const Matrix weights =
          matrix_of<E>(call.head_matrix<E>(at.weights, b, h) + row * p.seqlen_k + key, p.seqlen_k, rows, keys, scratch + at.scores[0]);
      const Matrix dscores =
          matrix_of<E>(call.head_matrix<E>(at.dscores, b, h) + row * p.seqlen_k + key, p.seqlen_k, rows, keys, scratch + at.scores[1]);
      const E *q = q_batch + h * p.q.head + row * p.q.row, *dout = dout_batch + h * p.dout.head + row * p.dout.row;
      Matrix q_rows = matrix_of(q, p.q.row, rows, p.headdim, scratch + at.tile[0]);
      Matrix dout_rows = matrix_of(dout, p.dout.row, rows, p.headdim_v, scratch + at.tile[1]);
      // Rows count for the keys that they see, if they have a gradient.
      const float* lse = lse_batch + h * p.lse.head + row * p.lse.row;
      const auto seen_by = [&](int64_t i) -> int64_t { return lse[i * p.lse.row] < kLowestLse ? 0 : p.mask().visible_end(row + i) - key; };
      const auto sees_all = [&](int64_t i) { return seen_by(i) >= keys; };
      const auto sees = [&](int64_t i, int64_t j) { return j < seen_by(i); };
      const bool taken_q = take_out_nonfinite(q_rows, rows, p.headdim, scratch + at.tile[0], sees_all);
      const bool taken_dout = take_out_nonfinite(dout_rows, rows, p.headdim_v, scratch + at.tile[1], sees_all);
      {
        const Traced traced("dv = p^T dout");
        multiply(call.blas, Side::kTransposed, Side::kPlain, keys, p.headdim_v, rows, 1.0f, weights, dout_rows, beta, dv.data, dv.ld);
      }
      {
        const Traced traced("dk = ds^T q");
        multiply(call.blas, Side::kTransposed, Side::kPlain, keys, p.headdim, rows, scale.product, dscores, q_rows, beta, dk.data, dk.ld);
      }
      beta = 1.0f;
      if (taken_dout)
        add_nonfinite(dout, p.dout.row, rows, p.headdim_v, line, dv, keys, sees_all, sees,
                      [&](int64_t i, int64_t j) { return weights.data[i * weights.ld + j]; });
      if (taken_q)
        add_nonfinite(q, p.q.row, rows, p.headdim, line, dk, keys, sees_all, sees,
                      [&](int64_t i, int64_t j) { return scale.product * dscores.data[i * dscores.ld + j]; });
    }

  dk.finish();
  dv.finish();
}

template void standard_backward_rows<float>(const StandardCall&, int64_t, float*);
template void standard_backward_rows<Half>(const StandardCall&, int64_t, float*);
template void standard_backward_rows<Brain>(const StandardCall&, int64_t, float*);
template void standard_backward_keys<float>(const StandardCall&, int64_t, float*);
template void standard_backward_keys<Half>(const StandardCall&, int64_t, float*);
template void standard_backward_keys<Brain>(const StandardCall&, int64_t, float*);

}  // namespace fattn::core
