// The two micro-kernels of decode. Vectors run along headdim; up to four rows that a tile holds in registers share each read of K and V. K and V
// are widened to fp32 as they are loaded, or multiplied as the bf16 pairs that they are (OpsDot). While a tile computes, it fetches as much of what
// comes after, a line for every line that it reads: a burst of prefetches would fill the queue of outstanding misses and stop the loads behind it.
#pragma once

#include <stdint.h>

namespace fattn::core::FATTN_ISA {

constexpr int64_t kDecodeBlock = 32;  // keys of one inner step; scores of a row are this far apart
static_assert(kDecodeBlock % kLanes == 0);

// Values that a step along headdim takes; rows of Q, and of what K, V and O are copied to, are padded with zeros to a multiple of it.
template <class Ops>
constexpr int64_t kStep = Ops::kPair* kLanes;

// q[0, n) sign for products with K, and weights p[0, n) for products with V: n up to kStep, zeros behind.
template <class T>
FATTN_INLINE void put_query(OpsF32, const T* q, int64_t n, float sign, float* to) {
  store(to, mul(load_n(q, n), set1(sign)));
}
FATTN_INLINE const float* weights_of(OpsF32, const float* p, int64_t, int64_t, float*) { return p; }

// kLanes elements of a row of K.
template <class T>
FATTN_INLINE F32 along_row(OpsF32, const T* k) {
  return load(k);
}

// kVecs vectors of columns of V, for Ops::kPair keys of which `n` are there. kFinite: 0 for Inf and NaN.
template <bool kFinite, int kVecs, class T>
FATTN_INLINE void columns(OpsF32, const T* v, int64_t, int64_t, F32 (&x)[kVecs]) {
  FATTN_UNROLL
  for (int w = 0; w < kVecs; ++w) x[w] = load(v + w * kLanes);
  if (kFinite) FATTN_UNROLL
  for (int w = 0; w < kVecs; ++w) x[w] = where_equal(sub(x[w], x[w]), zero(), x[w], zero());
}

// Rows that cannot be read in place: `rows` of n values, and zeros up to `padded` values and `all` rows.
template <class T>
FATTN_INLINE const float* copied(OpsF32, const T* from, int64_t stride, int64_t rows, int64_t n, int64_t all, int64_t padded, float* to) {
  copy_rows(from, stride, rows, n, to, padded);
  for (int64_t i = rows * padded; i < all * padded; i += kLanes) store(to + i, zero());
  return to;
}

#ifdef FATTN_DOT
FATTN_INLINE void put_query(OpsDot, const bf16* q, int64_t n, float sign, uint32_t* to) {
  bf16* halves = reinterpret_cast<bf16*>(to);
  for (int64_t d = 0; d < kStep<OpsDot>; d += kLanes) store_rounded(halves + d, mul(n > d ? load_n(q + d, n - d) : zero(), set1(sign)));
}
// `rows` rows, rounded to bf16 and padded to pairs, kDecodeBlock / 2 pairs apart.
FATTN_INLINE const uint32_t* weights_of(OpsDot, const float* p, int64_t rows, int64_t n, uint32_t* to) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t j = 0; j < n; j += kLanes)
      store_rounded(reinterpret_cast<bf16*>(to + r * kDecodeBlock / 2) + j, load_n(p + r * kDecodeBlock + j, n - j));
  return to;
}
FATTN_INLINE Pairs along_row(OpsDot, const bf16* k) { return load_pairs(k); }
template <bool kFinite, int kVecs>
FATTN_INLINE void columns(OpsDot, const bf16* v, int64_t stride, int64_t n, Pairs (&x)[kVecs]) {
  FATTN_UNROLL
  for (int w = 0; w < kVecs; w += 2) {
    Pairs first = load_pairs(v + w * kLanes), second = n > 1 ? load_pairs(v + stride + w * kLanes) : set1_pair(0);
    if (kFinite) {
      first = finite_halves(first);
      second = finite_halves(second);
    }
    interleave(first, second, x[w], x[w + 1]);
  }
}
FATTN_INLINE const bf16* copied(OpsDot, const bf16* from, int64_t stride, int64_t rows, int64_t n, int64_t all, int64_t padded, uint32_t* to) {
  bf16* const halves = reinterpret_cast<bf16*>(to);
  __builtin_memset(halves, 0, static_cast<size_t>(all * padded) * sizeof(bf16));
  for (int64_t r = 0; r < rows; ++r) __builtin_memcpy(halves + r * padded, from + r * stride, static_cast<size_t>(n) * sizeof(bf16));
  return halves;
}
#endif

// to[r][j] = q[r] . k[j] for kRows rows and kLanes / kRows keys: one accumulator each, then the sums of all together. `width` in values.
template <class Ops, int kRows, class T>
FATTN_INLINE void score_tile(const typename Ops::Element* q, const T* k, int64_t k_stride, int64_t width, float* to, NextRows& next) {
  constexpr int kKeys = kLanes / kRows;
  constexpr int64_t kLines = (kKeys * kStep<Ops> * static_cast<int64_t>(sizeof(T)) + kLineBytes - 1) / kLineBytes;
  F32 acc[kLanes];
  FATTN_UNROLL
  for (int i = 0; i < kLanes; ++i) acc[i] = zero();
  for (int64_t d = 0; d < width; d += kStep<Ops>) {
    typename Ops::Vec x[kRows];
    FATTN_UNROLL
    for (int r = 0; r < kRows; ++r) x[r] = Ops::vec(q + (r * width + d) / Ops::kPair);
    FATTN_UNROLL
    for (int j = 0; j < kKeys; ++j) {
      next.fetch_lines((j + 1) * kLines / kKeys - j * kLines / kKeys);
      const typename Ops::Vec y = along_row(Ops{}, k + j * k_stride + d);
      FATTN_UNROLL
      for (int r = 0; r < kRows; ++r) acc[r * kKeys + j] = Ops::multiply_add(x[r], y, acc[r * kKeys + j]);
    }
  }
  float sums[kLanes];
  store(sums, sum_each(acc));
  FATTN_UNROLL
  for (int r = 0; r < kRows; ++r) __builtin_memcpy(to + r * kDecodeBlock, sums + r * kKeys, sizeof(float) * kKeys);
}

template <class Ops, int kRows, class T>
FATTN_INLINE void score_row_group(const typename Ops::Element* q, const T* k, int64_t k_stride, int64_t width, float* to, NextRows& next) {
  constexpr int kKeys = kLanes / kRows;
  for (int j = 0; j < kLanes; j += kKeys) score_tile<Ops, kRows>(q, k + j * k_stride, k_stride, width, to + j, next);
}

// Calls tiles(row, number of rows, what to fetch) for groups of 4, 2 and 1 rows; the first of them fetches.
template <class Tiles>
FATTN_INLINE void for_row_groups(int64_t rows, NextRows& next, const Tiles& tiles) {
  NextRows first = next, none;  // in registers
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) tiles(r, Count<4>{}, r == 0 ? first : none);
  if (r + 2 <= rows) {
    tiles(r, Count<2>{}, r == 0 ? first : none);
    r += 2;
  }
  if (r < rows) tiles(r, Count<1>{}, r == 0 ? first : none);
  next = first;
}

// scores[r][0, kLanes) = q[r] . k for all rows.
template <class Ops, class T>
__attribute__((noinline)) void score_keys(const typename Ops::Element* q, int64_t rows, const T* k, int64_t k_stride, int64_t width, float* scores,
                                          NextRows& next) {
  for_row_groups(rows, next, [&](int64_t r, auto count, NextRows& fetched) {
    score_row_group<Ops, decltype(count)::value>(q + r * width / Ops::kPair, k, k_stride, width, scores + r * kDecodeBlock, fetched);
  });
}

// to[r][c] += sum over j < n of p[r][j] v[j][c] for kRows rows and kVecs vectors of columns.
template <class Ops, bool kFinite, int kRows, int kVecs, class T>
FATTN_INLINE void value_tile(const typename Ops::Element* p, const T* v, int64_t v_stride, int64_t n, float* to, int64_t to_stride, NextRows& next) {
  constexpr int64_t kLines = (kVecs * kStep<Ops> * static_cast<int64_t>(sizeof(T)) + kLineBytes - 1) / kLineBytes;
  F32 acc[kRows][kVecs];
  FATTN_UNROLL
  for (int r = 0; r < kRows; ++r) FATTN_UNROLL
  for (int w = 0; w < kVecs; ++w) acc[r][w] = load(to + r * to_stride + w * kLanes);
  for (int64_t j = 0; j < n; j += Ops::kPair) {
    typename Ops::Vec x[kVecs];
    columns<kFinite>(Ops{}, v + j * v_stride, v_stride, n - j, x);
    FATTN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      next.fetch_lines((r + 1) * kLines / kRows - r * kLines / kRows);
      const typename Ops::Vec weight = Ops::broadcast(reinterpret_cast<const char*>(p + (r * kDecodeBlock + j) / Ops::kPair));
      FATTN_UNROLL
      for (int w = 0; w < kVecs; ++w) acc[r][w] = Ops::multiply_add(weight, x[w], acc[r][w]);
    }
  }
  FATTN_UNROLL
  for (int r = 0; r < kRows; ++r) FATTN_UNROLL
  for (int w = 0; w < kVecs; ++w) store(to + r * to_stride + w * kLanes, acc[r][w]);
}

template <class Ops, bool kFinite, int kRows, class T>
FATTN_INLINE void value_row_group(const typename Ops::Element* p, const T* v, int64_t v_stride, int64_t n, float* to, int64_t width, NextRows& next) {
  constexpr int kVecs = kPanelVecs == 4 || kRows <= 2 ? 4 : 2;  // as many accumulators as the registers hold
  int64_t c = 0;
  for (; c + kVecs * kLanes <= width; c += kVecs * kLanes) value_tile<Ops, kFinite, kRows, kVecs>(p, v + c, v_stride, n, to + c, width, next);
  if (kVecs == 4 && c + 2 * kLanes <= width) {
    value_tile<Ops, kFinite, kRows, 2>(p, v + c, v_stride, n, to + c, width, next);
    c += 2 * kLanes;
  }
  if constexpr (Ops::kPair == 1)
    if (c < width) value_tile<Ops, kFinite, kRows, 1>(p, v + c, v_stride, n, to + c, width, next);
}

// to[r] += p[r] V for the first n keys and all rows; kFinite: without what is Inf or NaN in V.
template <class Ops, bool kFinite, class T>
__attribute__((noinline)) void add_values(const typename Ops::Element* p, int64_t rows, const T* v, int64_t v_stride, int64_t n, float* to,
                                          int64_t width, NextRows& next) {
  for_row_groups(rows, next, [&](int64_t r, auto count, NextRows& fetched) {
    value_row_group<Ops, kFinite, decltype(count)::value>(p + r * kDecodeBlock / Ops::kPair, v, v_stride, n, to + r * width, width, fetched);
  });
}

}  // namespace fattn::core::FATTN_ISA
