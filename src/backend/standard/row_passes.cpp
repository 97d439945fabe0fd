// Plain loops that the compiler vectorises, compiled once for each instruction set. Everything is branch-free inside the
// loops, and sums and maxima are kept in lanes, because the compiler may not reorder them itself.
#include "backend/standard/row_passes.h"

#include <cmath>
#include <limits>
#include <type_traits>

#include "device_abi/lowest.h"

#define FATTN_INLINE __attribute__((always_inline)) inline

namespace fattn::core {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int64_t kLanes = 32;

FATTN_INLINE uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
FATTN_INLINE float from_bits(uint32_t x) { return __builtin_bit_cast(float, x); }

// Conversions keep the 16 bits in a 32-bit integer: a loop of one element width is vectorised best.
template <class E>
FATTN_INLINE float value_of(uint32_t bits) {
  if constexpr (std::is_same_v<E, Brain>) return from_bits(bits << 16);
  const uint32_t magnitude = bits & 0x7fffu;
  const uint32_t shifted = magnitude << 13;
  const uint32_t normal = shifted + (112u << 23);
  const uint32_t special = shifted | 0x7f800000u;
  // Not by a product of the shifted bits, which are subnormal in fp32 and slow.
  const uint32_t subnormal = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t finite = magnitude < 0x400u ? subnormal : normal;
  return from_bits((magnitude >= 0x7c00u ? special : finite) | (bits & 0x8000u) << 16);
}

// Round to nearest even; NaN stays NaN.
template <class E>
FATTN_INLINE uint32_t encoded(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if constexpr (std::is_same_v<E, Brain>) {
    const uint32_t nan = (bits >> 16) | 0x40u;
    const uint32_t nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return magnitude > 0x7f800000u ? nan : nearest;
  }
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t subnormal = bits_of(from_bits(magnitude) + 0.5f) - 0x3f000000u;  // the sum rounds at 2^-24
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  return (magnitude >= 0x477ff000u ? special : finite) | ((bits >> 16) & 0x8000u);
}

// exp(x) within 2 ulp; 0 below the normal range, +inf above 88.3 (the last 0.4 before fp32 overflows), NaN for NaN.
FATTN_INLINE float exponential(float x) {
  constexpr float kToInteger = 0x1.8p23f;  // adding it leaves the integer part in the low bits
  const float shifted = x * 0x1.715476p0f + kToInteger;
  const float n = shifted - kToInteger;
  // ln 2 in two parts; the first has so few bits that n times it is exact.
  const float r = (x - n * 0x1.63p-1f) - n * -0x1.bd0106p-13f;
  // Taylor's series: |r| <= 0.347, so the first term left out is below 2^-27.
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const float value = p * from_bits((bits_of(shifted) << 23) + 0x3f800000u);
  const float low = x < -87.3f ? 0.0f : value;
  return x > 88.3f ? kInf : low;
}

template <class E>
FATTN_INLINE void load(const E* from, float* to, int64_t n) {
  for (int64_t j = 0; j < n; ++j) {
    if constexpr (std::is_same_v<E, float>)
      to[j] = from[j];
    else
      to[j] = value_of<E>(from[j].bits);
  }
}

template <class E>
FATTN_INLINE void store(const float* from, E* to, int64_t n) {
  for (int64_t j = 0; j < n; ++j) {
    if constexpr (std::is_same_v<E, float>)
      to[j] = from[j];
    else
      to[j].bits = static_cast<uint16_t>(encoded<E>(from[j]));
  }
}

// NaN is passed over.
FATTN_INLINE float largest(const float* row, int64_t n) {
  float lane[kLanes];
  for (int64_t l = 0; l < kLanes; ++l) lane[l] = -kInf;
  const int64_t whole = n / kLanes * kLanes;
  for (int64_t j = 0; j < whole; j += kLanes)
    for (int64_t l = 0; l < kLanes; ++l) lane[l] = row[j + l] > lane[l] ? row[j + l] : lane[l];
  float m = -kInf;
  for (int64_t l = 0; l < kLanes; ++l) m = lane[l] > m ? lane[l] : m;
  for (int64_t j = whole; j < n; ++j) m = row[j] > m ? row[j] : m;
  return m;
}

// row = exp(row - shift); returns the sum.
FATTN_INLINE float exponentials(float* row, int64_t n, float shift) {
  float lane[kLanes] = {};
  const int64_t whole = n / kLanes * kLanes;
  for (int64_t j = 0; j < whole; j += kLanes)
    for (int64_t l = 0; l < kLanes; ++l) {
      const float e = exponential(row[j + l] - shift);
      row[j + l] = e;
      lane[l] += e;
    }
  float sum = 0;
  for (int64_t j = whole; j < n; ++j) {
    row[j] = exponential(row[j] - shift);
    sum += row[j];
  }
  for (int64_t l = 0; l < kLanes; ++l) sum += lane[l];
  return sum;
}

template <class E>
FATTN_INLINE float softmax(float* row, E* weights, int64_t visible, int64_t n) {
  const float m = largest(row, visible);
  const float shift = m == -kInf ? 0.0f : m;  // all scores -inf or NaN: exp gives 0 or NaN
  const float sum = exponentials(row, visible, shift);
  const float scale = sum == 0.0f ? 0.0f : 1.0f / sum;
  if constexpr (std::is_same_v<E, float>) {
    for (int64_t j = 0; j < visible; ++j) row[j] *= scale;
    for (int64_t j = visible; j < n; ++j) row[j] = 0.0f;
  } else {
    for (int64_t j = 0; j < visible; ++j) weights[j].bits = static_cast<uint16_t>(encoded<E>(row[j] * scale));
    for (int64_t j = visible; j < n; ++j) weights[j] = E{0};
  }
  return sum == 0.0f ? -kInf : static_cast<float>(static_cast<double>(shift) + std::log(static_cast<double>(sum)));
}

// row = float(round(row)), kept in `to` as well. One short loop for each step of a row is faster than one long loop.
template <class E>
FATTN_INLINE void round_row(float* row, E* to, int64_t n) {
  if constexpr (!std::is_same_v<E, float>) {
    store(row, to, n);
    load(to, row, n);
  }
}

template <class E>
FATTN_INLINE void gradient(float* score, float* dweight, E* weights, E* dscore, int64_t visible, int64_t n, float lse, float delta, float factor) {
  const int64_t end = lse < kLowestLse ? 0 : visible;
  round_row(score, weights, end);
  round_row(dweight, dscore, end);
  for (int64_t j = 0; j < end; ++j) score[j] = exponential(score[j] - lse);
  for (int64_t j = end; j < n; ++j) score[j] = 0.0f;
  round_row(score, weights, n);
  for (int64_t j = 0; j < end; ++j) dweight[j] = score[j] * (dweight[j] - delta) * factor;
  for (int64_t j = end; j < n; ++j) dweight[j] = 0.0f;
  round_row(dweight, dscore, n);
}

FATTN_INLINE void add(float factor, const float* line, float* to, int64_t n) {
  for (int64_t j = 0; j < n; ++j) to[j] += factor * line[j];
}

// One set of functions for an instruction set: the loops above are inlined into them and vectorised for it.
#define FATTN_ROW_PASSES(name, target)                                                                                                       \
  template <class E>                                                                                                                         \
  struct name {                                                                                                                              \
    target static void load_row(const E* from, float* to, int64_t n) { load(from, to, n); }                                                  \
    target static void store_row(const float* from, E* to, int64_t n) { store(from, to, n); }                                                \
    target static float softmax_row(float* row, E* weights, int64_t visible, int64_t n) { return softmax(row, weights, visible, n); }        \
    target static void gradient_row(float* score, float* dweight, E* weights, E* dscore, int64_t visible, int64_t n, float lse, float delta, \
                                    float factor) {                                                                                          \
      gradient(score, dweight, weights, dscore, visible, n, lse, delta, factor);                                                             \
    }                                                                                                                                        \
    target static void add_row(float factor, const float* line, float* to, int64_t n) { add(factor, line, to, n); }                          \
    static constexpr RowPasses<E> kPasses{load_row, store_row, softmax_row, gradient_row, add_row};                                          \
  };

FATTN_ROW_PASSES(Baseline, )
#if defined(__x86_64__)
FATTN_ROW_PASSES(Avx2, __attribute__((target("avx2,fma"))))
FATTN_ROW_PASSES(Avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))))
#endif

}  // namespace

template <class E>
const RowPasses<E>& row_passes() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return Avx512<E>::kPasses;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Avx2<E>::kPasses;
#endif
  return Baseline<E>::kPasses;
}

template const RowPasses<float>& row_passes<float>();
template const RowPasses<Half>& row_passes<Half>();
template const RowPasses<Brain>& row_passes<Brain>();

}  // namespace fattn::core
