// Moving rows between tensors of any dtype and the fp32 (or bf16-pair) layouts that the products want.
#pragma once

#include <stdint.h>

namespace fattn::core::FATTN_ISA {

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// The first n of kLanes elements, the rest 0; reads nothing beyond them.
template <class T>
FATTN_INLINE F32 load_n(const T* p, int64_t n) {
  if (n >= kLanes) return load(p);
  T some[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) some[i] = p[i];
  return load(some);
}
template <class T>
FATTN_INLINE void store_n(T* p, F32 v, int64_t n) {
  if (n >= kLanes) {
    store(p, v);
    return;
  }
  T some[kLanes];
  store(some, v);
  for (int64_t i = 0; i < n; ++i) p[i] = some[i];
}

// to[row][0, padded) = from[row][0, n), zeros behind, as fp32.
template <class T>
FATTN_INLINE void copy_rows(const T* from, int64_t from_stride, int64_t rows, int64_t n, float* to, int64_t padded) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t d = 0; d < padded; d += kLanes) store(to + r * padded + d, load_n(from + r * from_stride + d, n - d));
}

// to[d][lane] = from[lane][d] * factor for kTile lanes, by lane_offset; lanes beyond `rows` are 0.
template <class T>
void pack_transposed(const T* from, int64_t from_stride, int64_t rows, int64_t n, float factor, float* to) {
  const F32 f = set1(factor);
  for (int lane = 0; lane < kTile; lane += kLanes)
    for (int64_t d = 0; d < n; d += kLanes) {
      F32 block[kLanes];
      for (int i = 0; i < kLanes; ++i) block[i] = lane + i < rows ? mul(load_n(from + (lane + i) * from_stride + d, n - d), f) : zero();
      transpose(block);
      const int64_t columns = n - d < kLanes ? n - d : kLanes;
      for (int64_t i = 0; i < columns; ++i) store(to + lane_offset(n, lane) + (d + i) * kPanel, block[i]);
    }
}

// Calls take(lane, d, vector of row `lane` from column d, columns) for every row of the transposed tile from[d][lane], by lane_offset.
template <class Take>
FATTN_INLINE void unpack_transposed(const float* from, int64_t rows, int64_t n, const Take& take) {
  for (int lane = 0; lane < rows; lane += kLanes)
    for (int64_t d = 0; d < n; d += kLanes) {
      F32 block[kLanes];
      const int64_t columns = n - d < kLanes ? n - d : kLanes;
      for (int i = 0; i < kLanes; ++i) block[i] = i < columns ? load(from + lane_offset(n, lane) + (d + i) * kPanel) : zero();
      transpose(block);
      for (int i = 0; i < kLanes && lane + i < rows; ++i) take(lane + i, d, block[i], columns);
    }
}

// In both halves of a word or in all of it: all bits but the sign, and what is added to them to reach the sign if the exponent is all ones.
template <class T>
struct ExponentBits;
template <>
struct ExponentBits<float> {
  static constexpr uint32_t kMagnitude = 0x7fffffffu, kCarry = 0x00800000u;
};
template <>
struct ExponentBits<f16> {
  static constexpr uint32_t kMagnitude = 0x7fff7fffu, kCarry = 0x04000400u;
};
template <>
struct ExponentBits<bf16> {
  static constexpr uint32_t kMagnitude = 0x7fff7fffu, kCarry = 0x00800080u;
};

// Is a value in rows x n not finite? By integers, which need no conversion.
template <class T>
bool any_nonfinite(const T* from, int64_t stride, int64_t rows, int64_t n) {
  typedef uint32_t Words __attribute__((vector_size(kLanes * sizeof(float))));
  using Bits = ExponentBits<T>;
  constexpr int64_t kElements = static_cast<int64_t>(sizeof(Words) / sizeof(T));
  Words found[2] = {};
  const auto look = [](Words & to, const T* at) __attribute__((always_inline)) {
    Words x;
    __builtin_memcpy(&x, at, sizeof x);
    to |= (x & Bits::kMagnitude) + Bits::kCarry;
  };
  for (int64_t r = 0; r < rows; ++r, from += stride) {
    int64_t d = 0;
    for (; d + 2 * kElements <= n; d += 2 * kElements) {
      look(found[0], from + d);
      look(found[1], from + d + kElements);
    }
    if (d + kElements <= n) look(found[0], from + d);
    if (n % kElements == 0) continue;
    if (n > kElements) {
      look(found[1], from + n - kElements);  // some of it once more
    } else {
      T some[kElements] = {};
      for (int64_t i = 0; i < n; ++i) some[i] = from[i];
      look(found[1], some);
    }
  }
  found[0] |= found[1];
  uint32_t all = 0;
  for (int i = 0; i < kLanes; ++i) all |= found[0][i];
  return (all & ~Bits::kMagnitude) != 0;
}

// log2(x) for normal x > 0, Inf and NaN, to 1e-7; -Inf for 0. The exponent is added in float64, which keeps the digits of both.
static inline double log2_of(float x) {
  if (x == 0.0f) return -__builtin_inf();
  if (!(x < __builtin_inff())) return static_cast<double>(x);
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  // mantissa in [sqrt(0.5), sqrt(2))
  const uint32_t shifted = bits - 0x3f3504f3u;
  const int32_t exponent = static_cast<int32_t>(shifted) >> 23;
  const float mantissa = __builtin_bit_cast(float, (shifted & 0x7fffffu) + 0x3f3504f3u);
  // log2(m) = 2 / ln 2 * atanh((m - 1) / (m + 1))
  const float s = (mantissa - 1.0f) / (mantissa + 1.0f), s2 = s * s;
  const float series = s * (2.88539008f + s2 * (0.961796694f + s2 * (0.577078016f + s2 * (0.412198583f + s2 * 0.320598898f))));
  return static_cast<double>(exponent) + static_cast<double>(series);
}

// What a sink adds to the sum of a row's weights, in units of exp(reference), of a row that has some. From kGreatestSink on it is all that counts,
// and the row's lse.
constexpr float kGreatestSink = 0x1p120f;
static inline float weight_of_sink(float sink, double reference) {
  const double weight = __builtin_exp(static_cast<double>(sink) - reference);
  return weight > static_cast<double>(kGreatestSink) ? kGreatestSink : static_cast<float>(weight);
}

}  // namespace fattn::core::FATTN_ISA
