// Forward pass of algorithm v1: Algorithm 1 of FlashAttention (Dao et al. 2022), whose lines the comments name. The outer loop is over blocks of keys
// and values, the inner one over blocks of queries; o, the rows' maxima m and the sums l of their weights are in memory between two blocks of keys,
// and o is whole after each: it is divided by l and multiplied again. (FlashAttention-2 turned the loops round, so that they stay in registers.)
#pragma once

#include "backend/cpu/v1_blocks.h"

namespace fattn::core::FATTN_ISA {

// What the cache is to hold.
struct V1ForwardScratch {
  Block q, v, scores, product;  // of a block of queries, of keys, of both (S, then P~), of queries (P~ V)
  float* k;                     // K^T of a block of keys, by load_transposed
  float *before, *now;          // of a row: what o so far and the block's part are multiplied with

  size_t lay_out(void* base, int64_t rows, int64_t keys, int64_t headdim, int64_t headdim_v) {
    Scratch s{static_cast<char*>(base)};
    q = take_block(s, rows, headdim);
    k = s.take<float>(padded_keys(keys) * headdim);
    v = take_block(s, keys, headdim_v);
    scores = take_block(s, rows, padded_keys(keys));
    product = take_block(s, rows, headdim_v);
    before = s.take<float>(rows);
    now = s.take<float>(rows);
    return s.used;
  }
};

// A row's P~ = exp(S - m~), in place, of the keys that it sees, and zeros up to `keys`. Returns m~ and l~.
struct RowOfBlock {
  float largest, sum;
};
FATTN_INLINE RowOfBlock weigh(float* scores, int64_t seen, int64_t keys, float factor) {
  const F32 hidden = set1(minus_infinity());
  F32 top = hidden, total = zero();
  for (int64_t j = 0; j < seen; j += kLanes) {
    const F32 s = load(scores + j);
    top = max(top, j + kLanes <= seen ? s : keep_below(s, static_cast<int>(seen - j), hidden));
  }
  const float largest = largest_lane(top);
  // Where all scores are -inf the weights are 0, not exp(-inf - -inf).
  const F32 reference = set1(largest == minus_infinity() ? 0.0f : largest), f = set1(factor);
  for (int64_t j = 0; j < keys; j += kLanes) {
    F32 p = zero();
    if (j < seen) p = exp2(mul(sub(load(scores + j), reference), f));
    if (j < seen && j + kLanes > seen) p = keep_below(p, static_cast<int>(seen - j), zero());
    total = add(total, p);
    store(scores + j, p);
  }
  return {largest, sum(total)};
}

// A block of keys, in scratch memory, meets a block of rows.
template <class T>
void v1_forward_blocks(const V1ForwardTask& task, const V1ForwardScratch& s, Block o, int64_t key, int64_t keys, int64_t row, bool v_nonfinite) {
  const int64_t rows = least(task.rows, task.seqlen_q - row), most = keys_seen(task, row + rows - 1, key, keys);
  const auto seen = [&](int64_t r) { return keys_seen(task, row + r, key, keys); };
  load_block(static_cast<const T*>(task.q) + row * task.q_stride, task.q_stride, rows, task.headdim, s.q);  // line 8
  product_with_keys(s.q, s.k, s.scores, rows, most, task.headdim);                                          // line 9: S = Q K^T

  const auto factor = static_cast<float>(Scale(task.scale).magnitude * 1.4426950408889634);
  for (int64_t r = 0; r < rows; ++r) {
    if (seen(r) == 0) continue;
    const RowOfBlock block = weigh(s.scores.row(r), seen(r), most, factor);  // line 10: m~, P~, l~
    float &m = task.largest[row + r], &l = task.sum[row + r];
    const float m_new = m > block.largest ? m : block.largest;  // line 11
    const float reference = m_new == minus_infinity() ? 0.0f : m_new;
    const float before = exp2_of_one((m - reference) * factor) * l, now = exp2_of_one((block.largest - reference) * factor);
    l = before + now * block.sum;
    m = m_new;
    const float inverse = l == 0.0f ? 0.0f : 1.0f / l;
    s.before[r] = before * inverse;
    s.now[r] = now * inverse;
  }

  // P~ V. Beside Inf and NaN, which must not meet the weight 0 of a key that is hidden, a row at a time, with the keys that it sees.
  const int64_t step = v_nonfinite && seen(0) < most ? 1 : rows;
  set_zero(s.product, rows);
  for (int64_t r = 0; r < rows; r += step) add_product<false>(s.scores.from(r), s.v, s.product.from(r), step, seen(r + step - 1), task.headdim_v);

  for (int64_t r = 0; r < rows; ++r) {  // line 12: o = (l e^(m - m_new) o + e^(m~ - m_new) P~ V) / l_new
    if (seen(r) == 0) continue;
    const F32 before = set1(s.before[r]), now = set1(s.now[r]);
    float* const to = o.row(row + r);
    for (int64_t d = 0; d < task.headdim_v; d += kLanes) {
      const int64_t n = task.headdim_v - d;
      store_n(to + d, fma(load(s.product.row(r) + d), now, mul(load_n(to + d, n), before)), n);
    }
  }
}

template <class T>
void v1_forward_head(const V1ForwardTask& task) {
  V1ForwardScratch s;
  s.lay_out(task.scratch, task.rows, task.keys, task.headdim, task.headdim_v);
  // An output of fp32 is the o that is read and written; of 16 bits one in fp32.
  const bool in_output = sizeof(T) == sizeof(float) || task.fp32_out;
  const Block o = in_output ? Block{static_cast<float*>(task.o), task.o_stride} : Block{task.sums, task.headdim_v};

  for (int64_t i = 0; i < task.seqlen_q; ++i) {  // line 2
    for (int64_t d = 0; d < task.headdim_v; d += kLanes) store_n(o.row(i) + d, zero(), task.headdim_v - d);
    task.largest[i] = minus_infinity();
    task.sum[i] = 0;
  }

  for (int64_t key = 0; key < task.seqlen_k; key += task.keys) {  // line 5
    const int64_t keys = least(task.keys, task.seqlen_k - key);
    const T* const k = static_cast<const T*>(task.k) + key * task.k_stride;
    const T* const v = static_cast<const T*>(task.v) + key * task.v_stride;
    load_transposed(k, task.k_stride, keys, task.headdim, Scale(task.scale).sign, s.k);  // line 6
    load_block(v, task.v_stride, keys, task.headdim_v, s.v);
    const bool v_nonfinite = any_nonfinite(v, task.v_stride, keys, task.headdim_v);
    for (int64_t row = first_block_of_rows(task, key); row < task.seqlen_q; row += task.rows)  // line 7
      v1_forward_blocks<T>(task, s, o, key, keys, row, v_nonfinite);
  }

  for (int64_t i = 0; i < task.seqlen_q; ++i) {
    const bool empty = task.sum[i] == 0.0f;
    for (int64_t d = 0; d < task.headdim_v && (!in_output || empty); d += kLanes) {  // all scores of a row may be -inf, and values Inf
      const int64_t n = task.headdim_v - d;
      const F32 x = empty ? zero() : load_n(o.row(i) + d, n);
      if (in_output)
        store_n(o.row(i) + d, x, n);
      else
        store_n(static_cast<T*>(task.o) + i * task.o_stride + d, x, n);
    }
    if (!task.lse) continue;
    const double lse = static_cast<double>(task.largest[i]) * Scale(task.scale).magnitude + 0.69314718055994530942 * log2_of(task.sum[i]);
    task.lse[i * task.lse_stride] = empty ? minus_infinity() : static_cast<float>(lse);
  }
}

}  // namespace fattn::core::FATTN_ISA
