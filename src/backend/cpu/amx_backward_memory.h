// What the AMX backward kernel (amx_backward.h) reads and writes: keys and rows packed for tiles, dQ added to memory, dK and dV stored.
#pragma once

#include "backend/cpu/amx_backward.h"

namespace fattn::core::amx {

template <bool kOptions>
inline bool Backward<kOptions>::all_finite(const uint16_t* x, int64_t stride, int64_t rows, int headdim) {
  __m512i largest = _mm512_setzero_si512();
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t d = 0; d < headdim; d += 32)
      largest = _mm512_max_epu16(largest, _mm512_and_si512(load_row(x, stride, r, rows, d, headdim), _mm512_set1_epi32(0x7fff7fff)));
  return largest_epu16(largest) < kInfinityBits;
}

template <bool kOptions>
inline void Backward<kOptions>::load_keys() {
  const uint16_t* k = static_cast<const uint16_t*>(t_.k) + t_.key_begin * t_.k_stride;
  const uint16_t* v = static_cast<const uint16_t*>(t_.v) + t_.key_begin * t_.v_stride;
  for (int64_t square = 0; square < at_.keys; ++square) {
    const uint16_t *ks = k + square * kSide * t_.k_stride, *vs = v + square * kSide * t_.v_stride;
    const int64_t n = min_of(kSide, t_.key_end - t_.key_begin - square * kSide);
    for (int64_t half = 0; half < 2; ++half) {
      pack_rows(ks + half * 16 * t_.k_stride, t_.k_stride, n - half * 16, t_.headdim, tile(at_.k, (square * 2 + half) * at_.depth));
      pack_rows(vs + half * 16 * t_.v_stride, t_.v_stride, n - half * 16, t_.headdim_v, tile(at_.v, (square * 2 + half) * at_.depth_v));
    }
    pack_transposed_rows(ks, t_.k_stride, n, t_.headdim, tile(at_.kt, square * 2 * at_.depth));
    finite_keys(square) = all_finite(ks, t_.k_stride, n, t_.headdim) && all_finite(vs, t_.v_stride, n, t_.headdim_v) ? kIsFinite : kHasNonfinite;
  }
  clear(at_.dk, at_.keys * 4 * at_.depth);
  clear(at_.dv, at_.keys * 4 * at_.depth_v);
  memory_barrier();
}

template <bool kOptions>
inline void Backward<kOptions>::load_rows() {
  const uint16_t* q = static_cast<const uint16_t*>(t_.q) + head_ * t_.q_head_stride + row_ * t_.q_stride;
  const uint16_t* dout = static_cast<const uint16_t*>(t_.dout) + head_ * t_.dout_head_stride + row_ * t_.dout_stride;
  const float* lse = t_.lse + head_ * t_.lse_head_stride + row_ * t_.lse_stride;
  const float* delta = t_.delta + head_ * t_.delta_head_stride + row_ * t_.delta_stride;
  for (int64_t i = 0; i < kBackwardRows; ++i) {
    const bool empty = i >= rows_ || lse[i * t_.lse_stride] < kLowestLse;
    lse_[i] = empty ? 0.0f : plain_nan(lse[i * t_.lse_stride] * (kOptions ? 1.0f : kLog2E * kFixed));
    delta_[i] = empty ? 0.0f : plain_nan(delta[i * t_.delta_stride]);
    begin_[i] = empty ? 0 : static_cast<int32_t>(min_of(first_key(row_ + i), t_.key_end) - t_.key_begin);
    visible_[i] = empty ? 0 : static_cast<int32_t>(max_of(begin_[i], limit(row_ + i) - t_.key_begin));
  }
  for (int64_t square = 0; square * kSide < rows_; ++square) {
    const uint16_t *qs = q + square * kSide * t_.q_stride, *ds = dout + square * kSide * t_.dout_stride;
    const int64_t n = rows_ - square * kSide;
    for (int64_t half = 0; half < 2; ++half) {
      pack_transposed(qs + half * 16 * t_.q_stride, t_.q_stride, n - half * 16, t_.headdim, t_.scale < 0 ? 0x80008000u : 0u,
                      tile(at_.q, (square * 2 + half) * at_.depth));
      pack_transposed(ds + half * 16 * t_.dout_stride, t_.dout_stride, n - half * 16, t_.headdim_v, 0,
                      tile(at_.dout, (square * 2 + half) * at_.depth_v));
    }
    pack_pairs(qs, t_.q_stride, n, t_.headdim, tile(at_.q_pairs, square * 2 * at_.depth));
    pack_pairs(ds, t_.dout_stride, n, t_.headdim_v, tile(at_.dout_pairs, square * 2 * at_.depth_v));
  }
  split_rows_ = false;
  finite_rows_ = all_finite(q, t_.q_stride, rows_, t_.headdim) && all_finite(dout, t_.dout_stride, rows_, t_.headdim_v);
  clear(at_.dq, kSquares * 4 * at_.depth);
  memory_barrier();
}

template <bool kOptions>
inline auto Backward<kOptions>::rows_of_square(int64_t r) const -> SquareRows {
  SquareRows rows{t_.key_end - t_.key_begin, 0, 0, t_.key_end - t_.key_begin};
  for (int64_t i = r * kSide; i < (r + 1) * kSide; ++i) {
    rows.whole_begin = max_of(rows.whole_begin, begin_[i]);
    rows.whole_end = min_of(rows.whole_end, visible_[i]);
    if (begin_[i] >= visible_[i]) continue;
    rows.seen_begin = min_of(rows.seen_begin, begin_[i]);
    rows.seen_end = max_of(rows.seen_end, visible_[i]);
  }
  return rows;
}

// x times scale to sums in two halves (dq_sums.h).
template <bool kOptions>
inline void Backward<kOptions>::add_to_halves(__m512 x, __m512 scale, uint16_t* high, uint16_t* low, __mmask16 lanes) {
  const __m512i high_half = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, high)), 16);
  const __m512i before = _mm512_or_si512(high_half, _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, low)));
  const __m512i sum = _mm512_castps_si512(_mm512_fmadd_ps(x, scale, _mm512_castsi512_ps(before)));
  _mm256_mask_storeu_epi16(high, lanes, _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16)));
  _mm256_mask_storeu_epi16(low, lanes, _mm512_cvtepi32_epi16(sum));
}

// Adds the block's dQ, transposed back, to memory.
template <bool kOptions>
inline void Backward<kOptions>::store_dq() const {
  const int64_t first = head_ * t_.dq_head_stride + row_ * t_.dq_stride, first_low = head_ * t_.dq_low_head_stride + row_ * t_.dq_low_stride;
  const __m512 scale = _mm512_set1_ps(t_.scale);
  for (int64_t i = 0; i * 16 < rows_; ++i)
    for (int64_t d = 0; d < t_.headdim; d += 16) {
      const float* from = values(at_.dq, i * 2 * at_.depth + d / 16);
      const __mmask16 lanes = first_lanes16(t_.headdim - d);
      __m512i x[16];
      for (int r = 0; r < 16; ++r) x[r] = _mm512_load_si512(from + r * 16);
      transpose16(x);
      for (int64_t r = 0; r < min_of(16, rows_ - i * 16); ++r) {
        const int64_t at = first + (i * 16 + r) * t_.dq_stride + d;
        if (t_.fp32_out) {
          float* const sums = static_cast<float*>(t_.dq) + at;
          _mm512_mask_storeu_ps(sums, lanes, _mm512_fmadd_ps(_mm512_castsi512_ps(x[r]), scale, _mm512_maskz_loadu_ps(lanes, sums)));
        } else {
          uint16_t* const low = t_.dq_low + first_low + (i * 16 + r) * t_.dq_low_stride + d;
          add_to_halves(_mm512_castsi512_ps(x[r]), scale, static_cast<uint16_t*>(t_.dq) + at, low, lanes);
        }
      }
    }
}

template <bool kOptions>
inline void Backward<kOptions>::store_gradient(int64_t offset, int64_t depth, int headdim, float scale, void* to, int64_t stride) const {
  for (int64_t j = 0; j < t_.key_end - t_.key_begin; ++j)
    for (int64_t d = 0; d < headdim; d += 16) {
      const __m512 x = _mm512_mul_ps(_mm512_load_ps(values(offset, j / 16 * 2 * depth + d / 16) + j % 16 * 16), _mm512_set1_ps(scale));
      const int64_t at = (t_.key_begin + j) * stride + d;
      if (t_.fp32_out)
        _mm512_mask_storeu_ps(static_cast<float*>(to) + at, first_lanes16(headdim - d), x);
      else
        _mm256_mask_storeu_epi16(static_cast<uint16_t*>(to) + at, first_lanes16(headdim - d), to_bf16(x));
    }
}

}  // namespace fattn::core::amx
