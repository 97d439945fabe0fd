// The two micro-kernels of decode. Vectors run along headdim; K and V are widened to fp32 as they are loaded, once for the up
// to four rows that a tile holds in registers. While a tile computes, it fetches rows that are wanted soon, a line for every
// line that it reads: a burst of prefetches would fill the queue of outstanding misses and stop the loads behind it.
#pragma once

#include <stdint.h>

namespace fattn::core::FATTN_ISA {

constexpr int64_t kDecodeBlock = 32;  // keys of one inner step; scores of a row are this far apart
static_assert(kDecodeBlock % kLanes == 0);

constexpr int64_t kLineBytes = 64;

// Rows to fetch into the cache: key j's begins at rows + j * stride, in bytes. A width of 0: nothing.
struct Ahead {
  const char* rows;
  int64_t stride, width;
};
constexpr Ahead kNothingAhead{nullptr, 0, 0};

// From row `row` and column `offset` (in bytes) on.
FATTN_INLINE Ahead rest_of(Ahead ahead, int64_t row, int64_t offset) {
  return offset < ahead.width ? Ahead{ahead.rows + row * ahead.stride + offset, ahead.stride, ahead.width - offset} : kNothingAhead;
}

template <class T>
FATTN_INLINE Ahead ahead_of(const T* rows, int64_t stride, int64_t width) {
  constexpr int64_t kSize = static_cast<int64_t>(sizeof(T));
  return {reinterpret_cast<const char*>(rows), stride * kSize, width * kSize};
}

// The columns [first, end) of n rows at once.
template <class T>
FATTN_INLINE void prefetch_rows(const T* from, int64_t stride, int64_t n, int64_t first, int64_t end) {
  for (int64_t r = 0; r < n; ++r)
    for (int64_t d = first; d < end; d += kLineBytes / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(from + r * stride + d);
}

// to[r][j] = q[r] . k[j] for kRows rows and kLanes / kRows keys: one accumulator each, then the sums of all together.
template <int kRows, class T>
FATTN_INLINE void score_tile(const float* q, const T* k, int64_t k_stride, int64_t width, float* to, Ahead ahead) {
  constexpr int kKeys = kLanes / kRows;
  F32 acc[kLanes];
  FATTN_UNROLL
  for (int i = 0; i < kLanes; ++i) acc[i] = zero();
  for (int64_t d = 0; d < width; d += kLanes) {
    const int64_t offset = d * static_cast<int64_t>(sizeof(T));
    if (offset % kLineBytes == 0 && offset < ahead.width) {
      FATTN_UNROLL
      for (int j = 0; j < kKeys; ++j) __builtin_prefetch(ahead.rows + j * ahead.stride + offset);
    }
    F32 x[kRows];
    FATTN_UNROLL
    for (int r = 0; r < kRows; ++r) x[r] = load(q + r * width + d);
    FATTN_UNROLL
    for (int j = 0; j < kKeys; ++j) {
      const F32 y = load(k + j * k_stride + d);
      FATTN_UNROLL
      for (int r = 0; r < kRows; ++r) acc[r * kKeys + j] = fma(x[r], y, acc[r * kKeys + j]);
    }
  }
  float sums[kLanes];
  store(sums, sum_each(acc));
  FATTN_UNROLL
  for (int r = 0; r < kRows; ++r) __builtin_memcpy(to + r * kDecodeBlock, sums + r * kKeys, sizeof(float) * kKeys);
}

template <int kRows, class T>
FATTN_INLINE void score_row_group(const float* q, const T* k, int64_t k_stride, int64_t width, float* to, Ahead ahead) {
  constexpr int kKeys = kLanes / kRows;
  for (int j = 0; j < kLanes; j += kKeys) score_tile<kRows>(q, k + j * k_stride, k_stride, width, to + j, rest_of(ahead, j, 0));
}

// scores[r][0, kLanes) = q[r] . k for all rows; the first of them fetch ahead.
template <class T>
__attribute__((noinline)) void score_keys(const float* q, int64_t rows, const T* k, int64_t k_stride, int64_t width, float* scores, Ahead ahead) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4, ahead = kNothingAhead) score_row_group<4>(q + r * width, k, k_stride, width, scores + r * kDecodeBlock, ahead);
  if (r + 2 <= rows) {
    score_row_group<2>(q + r * width, k, k_stride, width, scores + r * kDecodeBlock, ahead);
    ahead = kNothingAhead;
    r += 2;
  }
  if (r < rows) score_row_group<1>(q + r * width, k, k_stride, width, scores + r * kDecodeBlock, ahead);
}

// to[r][c] += sum over j < n of p[r][j] v[j][c] for kRows rows and kVecs vectors of columns.
template <int kRows, int kVecs, class T>
FATTN_INLINE void value_tile(const float* p, const T* v, int64_t v_stride, int64_t n, float* to, int64_t to_stride, Ahead ahead) {
  constexpr int64_t kBytes = kVecs * kLanes * static_cast<int64_t>(sizeof(T));
  F32 acc[kRows][kVecs];
  FATTN_UNROLL
  for (int r = 0; r < kRows; ++r) FATTN_UNROLL
  for (int w = 0; w < kVecs; ++w) acc[r][w] = load(to + r * to_stride + w * kLanes);
  for (int64_t j = 0; j < n; ++j) {
    if (ahead.width > 0) {
      FATTN_UNROLL
      for (int64_t b = 0; b < kBytes; b += kLineBytes) __builtin_prefetch(ahead.rows + j * ahead.stride + b);
    }
    F32 x[kVecs];
    FATTN_UNROLL
    for (int w = 0; w < kVecs; ++w) x[w] = load(v + j * v_stride + w * kLanes);
    FATTN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const F32 weight = set1(p[r * kDecodeBlock + j]);
      FATTN_UNROLL
      for (int w = 0; w < kVecs; ++w) acc[r][w] = fma(weight, x[w], acc[r][w]);
    }
  }
  FATTN_UNROLL
  for (int r = 0; r < kRows; ++r) FATTN_UNROLL
  for (int w = 0; w < kVecs; ++w) store(to + r * to_stride + w * kLanes, acc[r][w]);
}

template <int kRows, class T>
FATTN_INLINE void value_row_group(const float* p, const T* v, int64_t v_stride, int64_t n, float* to, int64_t width, Ahead ahead) {
  constexpr int kVecs = kPanelVecs == 4 || kRows <= 2 ? 4 : 2;  // as many accumulators as the registers hold
  const auto offset = [](int64_t c) { return c * static_cast<int64_t>(sizeof(T)); };
  int64_t c = 0;
  for (; c + kVecs * kLanes <= width; c += kVecs * kLanes)
    value_tile<kRows, kVecs>(p, v + c, v_stride, n, to + c, width, rest_of(ahead, 0, offset(c)));
  if (kVecs == 4 && c + 2 * kLanes <= width) {
    value_tile<kRows, 2>(p, v + c, v_stride, n, to + c, width, rest_of(ahead, 0, offset(c)));
    c += 2 * kLanes;
  }
  if (c < width) value_tile<kRows, 1>(p, v + c, v_stride, n, to + c, width, rest_of(ahead, 0, offset(c)));
}

// to[r] += p[r] V for the first n keys and all rows; the first of them fetch ahead.
template <class T>
__attribute__((noinline)) void add_values(const float* p, int64_t rows, const T* v, int64_t v_stride, int64_t n, float* to, int64_t width,
                                          Ahead ahead) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4, ahead = kNothingAhead) value_row_group<4>(p + r * kDecodeBlock, v, v_stride, n, to + r * width, width, ahead);
  if (r + 2 <= rows) {
    value_row_group<2>(p + r * kDecodeBlock, v, v_stride, n, to + r * width, width, ahead);
    ahead = kNothingAhead;
    r += 2;
  }
  if (r < rows) value_row_group<1>(p + r * kDecodeBlock, v, v_stride, n, to + r * width, width, ahead);
}

}  // namespace fattn::core::FATTN_ISA
