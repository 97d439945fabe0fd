// Products with an operand that holds Inf or NaN beside weights of 0, which must not meet: 0 * Inf is NaN, and a pair that is hidden takes no part.
// The operand goes into the product with zeros in such places. What these add to the visible pairs is found by a second product, of codes and of what
// kind a weight is: both as wide as any other, so that no value makes a call slow.
//
// A code is a digit in base 128 (NaN 1, +Inf 128, -Inf 128^2), a pair's kind 0 if it is hidden, 1 if its weight is above 0, and 129 if the weight is
// 0 or NaN: then Inf adds to both of its digits, which makes NaN. Sums over up to 126 terms do not carry into a digit that would mean less.
#pragma once

#include "backend/cpu/score_inputs.h"

namespace fattn::core::FATTN_ISA {

constexpr float kNanCode = 1, kInfCode = 128, kMinusInfCode = 128 * 128;
constexpr float kSomeWeight = 1, kNoWeight = 129;

// Rows of x without their Inf and NaN, and the codes of these; n numbers a row, side by side. all_nan: Inf makes NaN with any pair that counts.
// `finite` null: the codes alone.
template <class T>
void split_nonfinite(const T* x, int64_t stride, int64_t rows, int64_t n, bool all_nan, T* finite, T* codes) {
  const F32 infinity = set1(__builtin_inff()), zeros = zero();
  const F32 plus = set1(all_nan ? kNanCode : kInfCode), minus = set1(all_nan ? kNanCode : kMinusInfCode);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t d = 0; d < n; d += kLanes) {
      const F32 y = load_n(x + r * stride + d, n - d), is_finite = sub(y, y);
      const F32 code = where_equal(y, infinity, plus, where_equal(y, set1(minus_infinity()), minus, set1(kNanCode)));
      if (finite) store_n(finite + r * n + d, where_equal(is_finite, zeros, y, zeros), n - d);
      store_n(codes + r * n + d, where_equal(is_finite, zeros, zeros, code), n - d);
    }
}

// Adds to `to` what sums of codes times kinds say: nothing, Inf or NaN.
FATTN_INLINE void add_decoded(const float* sums, float* to) {
  typedef int32_t Ints __attribute__((vector_size(kLanes * sizeof(float))));  // for the compiler's operators
  typedef float Floats __attribute__((vector_size(kLanes * sizeof(float))));
  Floats f, x;
  __builtin_memcpy(&f, sums, sizeof f);
  __builtin_memcpy(&x, to, sizeof x);
  const Ints c = __builtin_convertvector(f, Ints);
  const Ints plus = (c & (127 << 7)) != 0, minus = (c & (127 << 14)) != 0;
  const Ints nan = (((c & 127) | (c >> 21)) != 0) | (plus & minus);
  const Ints bits = (nan & 0x7fc00000) | (~nan & ((plus & 0x7f800000) | (minus & static_cast<int32_t>(0xff800000u))));
  Floats added;
  __builtin_memcpy(&added, &bits, sizeof added);
  x += added;
  __builtin_memcpy(to, &x, sizeof x);
}

// The kinds of pairs from their weights; `hidden` is -Inf where a pair is. Rows of kStride lanes.
template <int64_t kStride>
void kinds_of(OpsF32, const float* hidden, const float* weights, int64_t keys, float* kinds) {
  const F32 hides = set1(minus_infinity()), some = set1(kSomeWeight), none = set1(kNoWeight), zeros = zero();
  for (int64_t i = 0; i < keys * kStride; i += kLanes)  // (a weight that is NaN makes NaN by itself)
    store(kinds + i, where_equal(load(hidden + i), hides, zeros, where_equal(load(weights + i), zeros, none, some)));
}
#ifdef FATTN_DOT
template <int64_t kStride>
void kinds_of(OpsDot, const float* hidden, const uint32_t* weights, int64_t keys, uint32_t* kinds) {
  const auto bits = [](float x) { return __builtin_bit_cast(uint32_t, x) >> 16; };  // kinds are bf16 as they are
  const uint32_t some = bits(kSomeWeight), none = bits(kNoWeight);
  for (int64_t key = 0; key < keys; key += 2) {
    const float *low = hidden + key * kStride, *high = low + (key + 1 < keys ? kStride : 0);
    for (int64_t l = 0; l < kStride; ++l) {
      const uint32_t pair = weights[key / 2 * kStride + l];
      const float a = __builtin_bit_cast(float, pair << 16), b = __builtin_bit_cast(float, pair & 0xffff0000u);
      const uint32_t first = low[l] == minus_infinity() ? 0 : a > 0 ? some : none;
      const uint32_t second = key + 1 >= keys || high[l] == minus_infinity() ? 0 : b > 0 ? some : none;
      kinds[key / 2 * kStride + l] = first | second << 16;
    }
  }
}
#endif

// Codes as the scalars of a product along keys, and of each element of a column (a key, or a pair of them) the bits of keys that have a code at all.
struct Codes {
  Scalars rows;
  const uint32_t* marks;

  bool any() const { return rows.data; }
  template <class Ops>
  Codes from(int64_t key) const {
    return {{rows.data + key / Ops::kPair * rows.stride, rows.stride}, marks + key / Ops::kPair};
  }
};

template <class Ops, class T>
void mark_nonfinite(const T* x, int64_t stride, int64_t rows, int64_t n, uint32_t* marks) {
  for (int64_t r = 0; r < rows; ++r) {
    const uint32_t bits = !any_nonfinite(x + r * stride, stride, 1, n) ? 0 : Ops::kPair == 1 ? ~0u : r % 2 == 0 ? 0xffffu : 0xffff0000u;
    marks[r / Ops::kPair] = bits | (r % Ops::kPair == 0 ? 0 : marks[r / Ops::kPair]);
  }
}

// The elements of a column from the first to the last with a code at a pair that counts; n elements of kStride lanes.
template <class Ops, int64_t kStride>
KeyRange codes_that_count(const typename Ops::Element* kinds, const uint32_t* marks, int64_t n) {
  const auto counts = [&](int64_t i) {
    if (marks[i] == 0) return false;
    uint32_t bits[kStride], all = 0;
    __builtin_memcpy(bits, kinds + i * kStride, sizeof bits);
    for (int64_t l = 0; l < kStride; ++l) all |= bits[l];
    return (all & marks[i]) != 0;
  };
  KeyRange range{0, n};
  while (range.begin < range.end && !counts(range.begin)) ++range.begin;
  while (range.begin < range.end && !counts(range.end - 1)) --range.end;
  return range;
}

// Are lanes [begin, end) of a tile of n rows, by lane_offset, all NaN? Then no code changes them, nor does a product with NaN.
static inline bool all_nan(const float* x, int64_t n, int64_t begin, int64_t end) {
  const F32 ones = set1(1.0f), zeros = zero();
  for (int64_t lane = begin; lane < end; lane += kLanes) {
    const float* at = x + lane_offset(n, lane);
    F32 numbers = zeros;
    if (at[0] == at[0]) return false;
    for (int64_t i = 0; i < n; ++i) {
      const F32 y = load(at + i * kPanel);
      numbers = max(numbers, where_equal(y, y, ones, zeros));
    }
    float some[kLanes];
    store(some, numbers);
    for (int64_t l = 0; l < kLanes && lane + l < end; ++l)
      if (some[l] != 0) return false;
  }
  return true;
}

// What sums hold. Inf and NaN stay what finite numbers are added to; nothing at all changes NaN.
enum class Sums { kSomeFinite, kNoneFinite, kAllNan };

// Of rows of n floats, `stride` apart, n any number.
static inline Sums what_sums_hold(const float* x, int64_t stride, int64_t rows, int64_t n) {
  const F32 zeros = zero(), ones = set1(1.0f), nan = set1(__builtin_nanf(""));
  F32 numbers = zeros;  // above 0 where one is no NaN
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < n; i += kLanes) {
      F32 y = load(x + r * stride + i);
      if (n - i < kLanes) y = keep_below(y, static_cast<int>(n - i), nan);
      if (largest_lane(where_equal(sub(y, y), zeros, ones, zeros)) > 0) return Sums::kSomeFinite;
      numbers = max(numbers, where_equal(y, y, ones, zeros));
    }
  return largest_lane(numbers) > 0 ? Sums::kNoneFinite : Sums::kAllNan;
}

// Of a tile of the backward pass, [key][kTile] lanes: P and dS of hidden pairs become 0, and the kinds of pairs, as P^T lies (rows) and as dS^T lies
// for dQ (columns, where it matters only whether a pair counts).
FATTN_INLINE void hide_and_tell_kinds(OpsF32, const float* hidden, int64_t keys, float* p, float* ds, float*, float* rows, float*) {
  const F32 hides = set1(minus_infinity()), some = set1(kSomeWeight), none = set1(kNoWeight), zeros = zero();
  for (int64_t i = 0; i < keys * kTile; i += kLanes) {
    const F32 h = load(hidden + i), weight = load(p + i);
    store(rows + i, where_equal(h, hides, zeros, where_equal(weight, zeros, none, some)));
    store(p + i, where_equal(h, hides, zeros, weight));
    store(ds + i, where_equal(h, hides, zeros, load(ds + i)));
  }
}
#ifdef FATTN_DOT
FATTN_INLINE void hide_and_tell_kinds(OpsDot, const float* hidden, int64_t keys, uint32_t* p_rows, uint32_t* ds_rows, uint32_t* ds_columns,
                                      uint32_t* rows, uint32_t* columns) {
  const auto bits = [](float x) { return static_cast<uint16_t>(__builtin_bit_cast(uint32_t, x) >> 16); };
  const uint16_t some = bits(kSomeWeight), none = bits(kNoWeight);
  bf16 *p = reinterpret_cast<bf16*>(p_rows), *ds = reinterpret_cast<bf16*>(ds_rows), *kinds = reinterpret_cast<bf16*>(rows);
  for (int64_t key = 0; key < keys; ++key) {
    const uint32_t half = key % 2 == 0 ? 0xffffu : 0xffff0000u;
    uint32_t *pairs = ds_columns + key / 2 * kTile, *counts = columns + key / 2 * kTile;
    for (int64_t l = 0; l < kTile; ++l) {
      const int64_t at = key * kTile + l;
      const bool hides = hidden[at] == minus_infinity();
      const uint16_t weight = p[at].bits;
      kinds[at].bits = hides ? uint16_t{0} : weight > 0 && weight <= 0x7f80 ? some : none;
      if (key % 2 == 0) counts[l] = 0;
      counts[l] |= hides ? 0u : (some | uint32_t{some} << 16) & half;
      p[at].bits = hides ? uint16_t{0} : weight;
      ds[at].bits = hides ? uint16_t{0} : ds[at].bits;
      pairs[l] &= hides ? ~half : ~0u;
    }
  }
}
#endif

}  // namespace fattn::core::FATTN_ISA
