// The tile of query rows of the backward walk (backward.h) in one query head: what is packed of it, which keys it sees, its part of dq.
#pragma once

#include "backend/cpu/backward.h"

namespace fattn::core::FATTN_ISA {

// Row-major tile of query rows as the vector operand of a product along the queries; rows beyond `rows` are 0.
template <class T>
FATTN_INLINE void pack_columns(OpsF32, const T* from, int64_t stride, int64_t rows, int64_t n, float* to) {
  const int64_t width = copy_stride(n);
  copy_rows(from, stride, rows, n, to, width);
  for (int64_t i = rows * width; i < kTile * width; i += kLanes) store(to + i, zero());
}
#ifdef FATTN_DOT
FATTN_INLINE void pack_columns(OpsDot, const bf16* from, int64_t stride, int64_t rows, int64_t n, uint32_t* to) {
  const int64_t width = copy_stride(n);
  Operand<bf16, OpsDot>::column_scalars(from, stride, rows, n, to);
  for (int64_t i = elements<OpsDot>(rows) * width; i < elements<OpsDot>(kTile) * width; ++i) to[i] = 0;
}
#endif

template <class T, class Ops>
void BackwardWalk<T, Ops>::load_rows() {
  q_ = static_cast<const T*>(t_.q) + head_ * t_.q_head_stride + row0_ * t_.q_stride;
  dout_ = static_cast<const T*>(t_.dout) + head_ * t_.dout_head_stride + row0_ * t_.dout_stride;
  pack_lanes(Ops{}, q_, t_.q_stride, rows_, t_.headdim, scaling_.sign, scratch_.q_lanes);
  pack_lanes(Ops{}, dout_, t_.dout_stride, rows_, t_.headdim_v, 1.0f, scratch_.dout_lanes);
  pack_columns(Ops{}, q_, t_.q_stride, rows_, t_.headdim, scratch_.q_columns);
  pack_columns(Ops{}, dout_, t_.dout_stride, rows_, t_.headdim_v, scratch_.dout_columns);
  for (int64_t i = 0; i < static_cast<int64_t>(t_.headdim) * kTile; i += kLanes) store(scratch_.dq + i, zero());
  some_without_ = false;
  for (int64_t i = 0; i < kTile; ++i) {
    const float l = i < rows_ ? t_.lse[head_ * t_.lse_head_stride + (row0_ + i) * t_.lse_stride] : minus_infinity();
    lse_[i] = l < kLowestLse ? __builtin_inff() : l;
    delta_[i] = i < rows_ ? t_.delta[head_ * t_.delta_head_stride + (row0_ + i) * t_.delta_stride] : 0.0f;
    some_without_ = some_without_ || (i < rows_ && !has_gradient(lse_[i]));
  }
  q_nonfinite_ = dout_nonfinite_ = -1;
  rows_split_ = false;
}

// The keys of the task that some row sees.
template <class T, class Ops>
KeyRange BackwardWalk<T, Ops>::keys_of_rows() const {
  const int64_t last_seen = row0_ + rows_ - 1 + t_.diagonal - t_.key_begin, unseen = row0_ + t_.left_diagonal - t_.key_begin;
  const KeyRange some{unseen > 0 ? unseen : 0, last_seen < task_keys_ ? last_seen : task_keys_};
  return documents() ? keys_of(ids_, in_.document_k + t_.key_begin, some.begin, some.end) : some;
}

// Which rows come next, of the next head or before these, so that products fetch them line by line.
template <class T, class Ops>
void BackwardWalk<T, Ops>::fetch_next_rows(KeyRange some) {
  next_q_ = next_dout_ = next_dq_ = next_dq_low_ = NextRows{};
  fetched_ = 0;
  const bool next_head = head_ + 1 < t_.group;
  if (!kFetchesAhead || (!next_head && row0_ <= begin_) || some.begin >= some.end) return;
  const int64_t to_next = next_head ? 0 : row0_ - begin_ < kTile ? row0_ - begin_ : kTile;  // rows before
  const int64_t next = next_head ? rows_ : to_next, heads = next_head ? 1 : -head_;
  const int64_t blocks = (some.end - some.begin + t_.block_k - 1) / t_.block_k;
  next_q_ = NextRows(q_ + heads * t_.q_head_stride - to_next * t_.q_stride, t_.q_stride, next, t_.headdim);
  next_dout_ = NextRows(dout_ + heads * t_.dout_head_stride - to_next * t_.dout_stride, t_.dout_stride, next, t_.headdim_v);
  with_dq<T>(t_, head_ + heads, row0_ - to_next, [&](const auto& dq) {
    next_dq_ = dq.next(next, t_.headdim);
    next_dq_low_ = dq.next_low(next, t_.headdim);
  });
  fetched_ = (kTile + kPanelsOfTile * blocks - 1) / (kPanelsOfTile * blocks);
}

template <class T, class Ops>
void BackwardWalk<T, Ops>::store_dq() {
  const F32 scale = set1(t_.scale);
  with_dq<T>(t_, head_, row0_, [&](const auto& dq) {
    unpack_transposed(scratch_.dq, rows_, t_.headdim, [&](int64_t row, int64_t d, F32 x, int64_t columns) {
      if (!has_gradient(lse_[row])) return;  // 0 * -inf, where k holds -inf, is NaN
      dq.add(row, d, x, scale, columns);
    });
  });
}

template <class T, class Ops>
bool BackwardWalk<T, Ops>::rows_nonfinite() {
  if (q_nonfinite_ < 0) {
    q_nonfinite_ = any_nonfinite(q_, t_.q_stride, rows_, t_.headdim);
    dout_nonfinite_ = any_nonfinite(dout_, t_.dout_stride, rows_, t_.headdim_v);
  }
  return q_nonfinite_ > 0 || dout_nonfinite_ > 0;
}

// Q and dO in two parts each (nonfinite.h): what is finite, and codes of the rest.
template <class T, class Ops>
void BackwardWalk<T, Ops>::split_rows() {
  const auto split = [&](const T* from, int64_t stride, int64_t n, bool all_nan, Element* finite, Element* codes) __attribute__((always_inline)) {
    split_nonfinite(from, stride, rows_, n, all_nan, scratch_.finite_rows, scratch_.code_rows);
    pack_columns(Ops{}, scratch_.finite_rows, n, rows_, n, finite);
    pack_columns(Ops{}, scratch_.code_rows, n, rows_, n, codes);
  };
  // With an Inf in q, or in k, dS is 0 or NaN.
  if (q_nonfinite_) split(q_, t_.q_stride, t_.headdim, true, scratch_.q_finite, scratch_.q_codes);
  if (dout_nonfinite_) split(dout_, t_.dout_stride, t_.headdim_v, false, scratch_.dout_finite, scratch_.dout_codes);
  rows_split_ = true;
}

}  // namespace fattn::core::FATTN_ISA
