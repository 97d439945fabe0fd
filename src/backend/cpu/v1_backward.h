// Backward pass of algorithm v1: Algorithm 4 of FlashAttention (Dao et al. 2022, appendix B). The outer loop is over
// blocks of keys and values, whose dk and dv stay in the cache, the inner one over blocks of queries; dq is in memory and is read and written for
// each block of keys. P is computed again from lse, which says what m and l do. A key head's gradients are sums over the query heads that share it.
#pragma once

#include "backend/cpu/v1_forward.h"
#include "device_abi/lowest.h"

namespace fattn::core::FATTN_ISA {

// What the cache is to hold.
struct V1BackwardScratch {
  Block k, dk, dv;               // of a block of keys
  float *k_columns, *v_columns;  // K^T and V^T, by load_transposed
  Block q, dout, dq;             // of a block of queries
  Block p, ds;                   // of both: S, then P; dP, then dS
  float* delta;                  // of a row

  size_t lay_out(void* base, int64_t rows, int64_t keys, int64_t headdim, int64_t headdim_v) {
    Scratch s{static_cast<char*>(base)};
    k = take_block(s, keys, headdim);
    dk = take_block(s, keys, headdim);
    dv = take_block(s, keys, headdim_v);
    k_columns = s.take<float>(padded_keys(keys) * headdim);
    v_columns = s.take<float>(padded_keys(keys) * headdim_v);
    q = take_block(s, rows, headdim);
    dout = take_block(s, rows, headdim_v);
    dq = take_block(s, rows, headdim);
    p = take_block(s, rows, padded_keys(keys));
    ds = take_block(s, rows, padded_keys(keys));
    delta = s.take<float>(rows);
    return s.used;
  }
};

// P = exp(S - lse) and dS = P (dP - delta) of a row, in place, of the keys that it sees, and zeros up to `keys`.
FATTN_INLINE void row_gradient(float* p, float* ds, int64_t seen, int64_t keys, float magnitude, float lse, float delta) {
  const F32 scale = set1(magnitude), minus_lse = set1(-lse), log2e = set1(kLog2E), d = set1(delta);
  for (int64_t j = 0; j < keys; j += kLanes) {
    F32 weight = zero(), gradient = zero();
    if (j < seen) {
      weight = exp2_weight(mul(fma(load(p + j), scale, minus_lse), log2e));
      gradient = mul(weight, sub(load(ds + j), d));
    }
    if (j < seen && j + kLanes > seen) {
      weight = keep_below(weight, static_cast<int>(seen - j), zero());
      gradient = keep_below(gradient, static_cast<int>(seen - j), zero());
    }
    store(p + j, weight);
    store(ds + j, gradient);
  }
}

// A block of keys, in scratch memory, meets a block of rows of query head `head` of the group.
template <class T>
void v1_backward_blocks(const V1BackwardTask& task, const V1BackwardScratch& s, Block dq, int64_t head, int64_t key, int64_t keys, int64_t row,
                        bool k_nonfinite) {
  const int64_t rows = least(task.rows, task.seqlen_q - row), most = keys_seen(task, row + rows - 1, key, keys);
  const T* const q = static_cast<const T*>(task.q) + head * task.q_head_stride + row * task.q_stride;
  const T* const o = static_cast<const T*>(task.o) + head * task.o_head_stride + row * task.o_stride;
  const T* const dout = static_cast<const T*>(task.dout) + head * task.dout_head_stride + row * task.dout_stride;
  const auto lse = [&](int64_t r) { return task.lse[head * task.lse_head_stride + (row + r) * task.lse_stride]; };
  const auto has_gradient = [&](int64_t r) { return !(lse(r) < kLowestLse); };
  const auto seen = [&](int64_t r) { return has_gradient(r) ? keys_seen(task, row + r, key, keys) : 0; };
  load_block(q, task.q_stride, rows, task.headdim, s.q);
  load_block(dout, task.dout_stride, rows, task.headdim_v, s.dout);

  product_with_keys(s.q, s.k_columns, s.p, rows, most, task.headdim);                          // S = Q K^T
  product_with_keys(s.dout, s.v_columns, s.ds, rows, most, task.headdim_v);                    // dP = dO V^T
  row_dots_of<T>(o, task.o_stride, dout, task.dout_stride, rows, task.headdim_v, s.delta, 1);  // rowsum(dO * O)
  bool all_see_all = true;
  for (int64_t r = 0; r < rows; ++r) {
    if (task.dlse && has_gradient(r)) s.delta[r] -= task.dlse[head * task.dlse_head_stride + (row + r) * task.dlse_stride];
    row_gradient(s.p.row(r), s.ds.row(r), seen(r), most, static_cast<float>(Scale(task.scale).magnitude), lse(r), s.delta[r]);
    all_see_all = all_see_all && seen(r) == most;
  }

  // Beside Inf and NaN, which must not meet the weight 0 of a pair that is hidden, a row at a time, with the keys that it sees.
  const bool careful = !all_see_all && (k_nonfinite || any_nonfinite(q, task.q_stride, rows, task.headdim) ||
                                        any_nonfinite(dout, task.dout_stride, rows, task.headdim_v));
  const int64_t step = careful ? 1 : rows;
  set_zero(s.dq, rows);
  for (int64_t r = 0; r < rows; r += step) {
    const int64_t n = careful ? seen(r) : most;
    add_product<true>(s.p.from(r), s.dout.from(r), s.dv, n, step, task.headdim_v);  // dV += P^T dO
    add_product<false>(s.ds.from(r), s.k, s.dq.from(r), step, n, task.headdim);     // dQ += scale dS K
    add_product<true>(s.ds.from(r), s.q.from(r), s.dk, n, step, task.headdim);      // dK += scale dS^T Q, scaled in the end
  }
  const F32 scale = set1(task.scale);
  for (int64_t r = 0; r < rows; ++r) {
    if (seen(r) == 0) continue;
    float* const to = dq.row(row + r);
    for (int64_t d = 0; d < task.headdim; d += kLanes) {
      const int64_t n = task.headdim - d;
      store_n(to + d, fma(load(s.dq.row(r) + d), scale, load_n(to + d, n)), n);
    }
  }
}

// dk and dv of a block of keys, as Out.
template <class Out>
void v1_store_keys(const V1BackwardTask& task, const V1BackwardScratch& s, int64_t key, int64_t keys) {
  const F32 scale = set1(task.scale);
  for (int64_t j = 0; j < keys; ++j) {
    Out* const dk = static_cast<Out*>(task.dk) + (key + j) * task.dk_stride;
    Out* const dv = static_cast<Out*>(task.dv) + (key + j) * task.dv_stride;
    for (int64_t d = 0; d < task.headdim; d += kLanes) store_n(dk + d, mul(load(s.dk.row(j) + d), scale), task.headdim - d);
    for (int64_t d = 0; d < task.headdim_v; d += kLanes) store_n(dv + d, load(s.dv.row(j) + d), task.headdim_v - d);
  }
}

template <class T>
void v1_backward_head(const V1BackwardTask& task) {
  V1BackwardScratch s;
  s.lay_out(task.scratch, task.rows, task.keys, task.headdim, task.headdim_v);
  // An output of fp32 is the dq that is read and written; of 16 bits one in fp32.
  const bool in_output = sizeof(T) == sizeof(float) || task.fp32_out;
  const auto dq_of = [&](int64_t head) {
    if (in_output) return Block{static_cast<float*>(task.dq) + head * task.dq_head_stride, task.dq_stride};
    return Block{task.sums + head * task.seqlen_q * task.headdim, task.headdim};
  };

  for (int64_t head = 0; head < task.group; ++head)
    for (int64_t i = 0; i < task.seqlen_q; ++i)
      for (int64_t d = 0; d < task.headdim; d += kLanes) store_n(dq_of(head).row(i) + d, zero(), task.headdim - d);

  for (int64_t key = 0; key < task.seqlen_k; key += task.keys) {
    const int64_t keys = least(task.keys, task.seqlen_k - key);
    const T* const k = static_cast<const T*>(task.k) + key * task.k_stride;
    const T* const v = static_cast<const T*>(task.v) + key * task.v_stride;
    load_block(k, task.k_stride, keys, task.headdim, s.k);
    load_transposed(k, task.k_stride, keys, task.headdim, Scale(task.scale).sign, s.k_columns);
    load_transposed(v, task.v_stride, keys, task.headdim_v, 1.0f, s.v_columns);
    const bool k_nonfinite = any_nonfinite(k, task.k_stride, keys, task.headdim);
    set_zero(s.dk, keys);
    set_zero(s.dv, keys);
    for (int64_t head = 0; head < task.group; ++head)
      for (int64_t row = first_block_of_rows(task, key); row < task.seqlen_q; row += task.rows)
        v1_backward_blocks<T>(task, s, dq_of(head), head, key, keys, row, k_nonfinite);
    task.fp32_out ? v1_store_keys<float>(task, s, key, keys) : v1_store_keys<T>(task, s, key, keys);
  }

  if (in_output) return;
  for (int64_t head = 0; head < task.group; ++head)
    for (int64_t i = 0; i < task.seqlen_q; ++i) {
      T* const to = static_cast<T*>(task.dq) + head * task.dq_head_stride + i * task.dq_stride;
      for (int64_t d = 0; d < task.headdim; d += kLanes) store_n(to + d, load_n(dq_of(head).row(i) + d, task.headdim - d), task.headdim - d);
    }
}

}  // namespace fattn::core::FATTN_ISA
