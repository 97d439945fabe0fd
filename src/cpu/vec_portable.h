// Vec layer, portable: 4 lanes by the compiler's vector extension, for any processor. The other vec_*.h offer the same
// names; vec_common.h says what they mean.
#pragma once

#include <stdint.h>

#include "cpu/vec_types.h"

namespace fattn::core::FATTN_ISA {

typedef float F32 __attribute__((vector_size(16)));
typedef int32_t I32 __attribute__((vector_size(16)));
constexpr int kLanes = 4;
constexpr int kPanelVecs = 2;  // 6 x 2 accumulators fit 16 registers
constexpr bool kHasDot = false;
constexpr bool kFetchesAhead = false;
constexpr int64_t kInPlace = 0;

#define FATTN_INLINE static inline __attribute__((always_inline))

FATTN_INLINE F32 set1(float x) { return F32{x, x, x, x}; }
FATTN_INLINE F32 zero() { return set1(0.0f); }
FATTN_INLINE F32 load(const float* p) {
  F32 v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
FATTN_INLINE void store(float* p, F32 v) { __builtin_memcpy(p, &v, sizeof v); }
FATTN_INLINE F32 add(F32 a, F32 b) { return a + b; }
FATTN_INLINE F32 sub(F32 a, F32 b) { return a - b; }
FATTN_INLINE F32 mul(F32 a, F32 b) { return a * b; }
FATTN_INLINE F32 div(F32 a, F32 b) { return a / b; }
FATTN_INLINE F32 sqrt(F32 a) { return F32{__builtin_sqrtf(a[0]), __builtin_sqrtf(a[1]), __builtin_sqrtf(a[2]), __builtin_sqrtf(a[3])}; }
FATTN_INLINE F32 fma(F32 a, F32 b, F32 c) { return a * b + c; }
FATTN_INLINE F32 select(I32 mask, F32 a, F32 b) { return (F32)((mask & (I32)a) | (~mask & (I32)b)); }
FATTN_INLINE F32 max(F32 a, F32 b) { return select(a > b, a, b); }
FATTN_INLINE bool all_smaller(F32 x, float limit) {
  const I32 smaller = (x < set1(limit)) & (x > set1(-limit));
  return (smaller[0] & smaller[1] & smaller[2] & smaller[3]) != 0;
}
FATTN_INLINE F32 where_equal(F32 a, F32 b, F32 x, F32 y) { return select(a == b, x, y); }
FATTN_INLINE F32 keep_from(F32 x, int first, F32 other) { return select(I32{0, 1, 2, 3} >= I32{first, first, first, first}, x, other); }
FATTN_INLINE F32 keep_below(F32 x, int end, F32 other) { return select(I32{0, 1, 2, 3} < I32{end, end, end, end}, x, other); }
FATTN_INLINE float sum(F32 v) { return (v[0] + v[1]) + (v[2] + v[3]); }
FATTN_INLINE float largest_lane(F32 v) {
  const float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
  return a > b ? a : b;
}
FATTN_INLINE F32 load(const f16* p) {
  return F32{f16_to_float(p[0].bits), f16_to_float(p[1].bits), f16_to_float(p[2].bits), f16_to_float(p[3].bits)};
}
FATTN_INLINE F32 load(const bf16* p) {
  return F32{bf16_to_float(p[0].bits), bf16_to_float(p[1].bits), bf16_to_float(p[2].bits), bf16_to_float(p[3].bits)};
}
FATTN_INLINE void store(f16* p, F32 v) {
  for (int i = 0; i < 4; ++i) p[i].bits = float_to_f16(v[i]);
}
FATTN_INLINE void store(bf16* p, F32 v) {
  for (int i = 0; i < 4; ++i) p[i].bits = float_to_bf16(v[i]);
}
FATTN_INLINE F32 shift_exponent(F32 t) { return (F32)((I32)t << 23); }
FATTN_INLINE F32 load(const uint8_t* p) {
  return F32{static_cast<float>(p[0]), static_cast<float>(p[1]), static_cast<float>(p[2]), static_cast<float>(p[3])};
}

typedef uint32_t U32 __attribute__((vector_size(16)));
FATTN_INLINE U32 set1_u32(uint32_t x) { return U32{x, x, x, x}; }
FATTN_INLINE U32 load_u32(const uint32_t* p) {
  U32 v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
FATTN_INLINE void store_u32(uint32_t* p, U32 v) { __builtin_memcpy(p, &v, sizeof v); }
FATTN_INLINE U32 xor_u32(U32 a, U32 b) { return a ^ b; }
FATTN_INLINE void multiply_wide(U32 x, U32 m, U32& high, U32& low) {
  for (int i = 0; i < 4; ++i) {
    const uint64_t product = static_cast<uint64_t>(x[i]) * m[i];
    high[i] = static_cast<uint32_t>(product >> 32);
    low[i] = static_cast<uint32_t>(product);
  }
}
FATTN_INLINE F32 keep_not_below(F32 x, U32 word, U32 limit) { return select((I32)(word >= limit), x, zero()); }
FATTN_INLINE F32 keep_if(F32 x, U32 word, U32 bit) { return select((I32)((word & bit) != 0), x, zero()); }
FATTN_INLINE F32 where_bit(U32 word, U32 bit, F32 x, F32 y) { return select((I32)((word & bit) != 0), x, y); }
FATTN_INLINE uint32_t nonzero_bytes(const uint8_t* p) { return nonzero_bytes_by_words(p); }

}  // namespace fattn::core::FATTN_ISA

#include "cpu/exp2.h"

namespace fattn::core::FATTN_ISA {

FATTN_INLINE F32 exp2(F32 x) { return exp2_by_magic(x); }
FATTN_INLINE F32 exp2_weight(F32 x) { return select(x < set1(kLeastWeight), zero(), exp2(x)); }
FATTN_INLINE void transpose(F32 (&r)[4]) {
  const F32 a = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5), b = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7);
  const F32 c = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5), d = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
  r[0] = __builtin_shufflevector(a, c, 0, 1, 4, 5);
  r[1] = __builtin_shufflevector(a, c, 2, 3, 6, 7);
  r[2] = __builtin_shufflevector(b, d, 0, 1, 4, 5);
  r[3] = __builtin_shufflevector(b, d, 2, 3, 6, 7);
}
FATTN_INLINE F32 sum_each(const F32 (&r)[4]) {
  F32 t[4] = {r[0], r[1], r[2], r[3]};
  transpose(t);
  return (t[0] + t[1]) + (t[2] + t[3]);
}

}  // namespace fattn::core::FATTN_ISA
