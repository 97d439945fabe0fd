// Vec layer for AVX2 with FMA and F16C. Names: vec_types.h.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "cpu/vec_types.h"

namespace fattn::core::FATTN_ISA {

typedef __m256 F32;
constexpr int kLanes = 8;
constexpr int kPanelVecs = 2;  // 6 x 2 accumulators of 16 registers
constexpr bool kHasDot = false;
constexpr bool kFetchesAhead = true;
// On a Zen 3 that saves 3 to 9 % of a forward pass at 512 to 3072 bytes; at 4096 and more it costs up to 5 %.
constexpr int64_t kInPlace = 1023;

#define FATTN_INLINE static inline __attribute__((always_inline))

FATTN_INLINE F32 set1(float x) { return _mm256_set1_ps(x); }
FATTN_INLINE F32 zero() { return _mm256_setzero_ps(); }
FATTN_INLINE F32 load(const float* p) { return _mm256_loadu_ps(p); }
FATTN_INLINE void store(float* p, F32 v) { _mm256_storeu_ps(p, v); }
FATTN_INLINE F32 add(F32 a, F32 b) { return _mm256_add_ps(a, b); }
FATTN_INLINE F32 sub(F32 a, F32 b) { return _mm256_sub_ps(a, b); }
FATTN_INLINE F32 mul(F32 a, F32 b) { return _mm256_mul_ps(a, b); }
FATTN_INLINE F32 div(F32 a, F32 b) { return _mm256_div_ps(a, b); }
FATTN_INLINE F32 sqrt(F32 a) { return _mm256_sqrt_ps(a); }
FATTN_INLINE F32 fma(F32 a, F32 b, F32 c) { return _mm256_fmadd_ps(a, b, c); }
FATTN_INLINE F32 max(F32 a, F32 b) { return _mm256_max_ps(a, b); }
FATTN_INLINE bool all_smaller(F32 x, float limit) {
  return _mm256_movemask_ps(_mm256_cmp_ps(_mm256_andnot_ps(set1(-0.0f), x), set1(limit), _CMP_NLT_UQ)) == 0;
}
FATTN_INLINE F32 where_equal(F32 a, F32 b, F32 x, F32 y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_EQ_OQ)); }
FATTN_INLINE F32 keep_from(F32 x, int first, F32 other) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i drop = _mm256_cmpgt_epi32(_mm256_set1_epi32(first), lanes);
  return _mm256_blendv_ps(x, other, _mm256_castsi256_ps(drop));
}
FATTN_INLINE F32 keep_below(F32 x, int end, F32 other) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(end), lanes)));
}
FATTN_INLINE float sum(F32 v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
FATTN_INLINE float largest_lane(F32 v) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
FATTN_INLINE F32 load(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
FATTN_INLINE F32 load(const bf16* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
FATTN_INLINE void store(f16* p, F32 v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
FATTN_INLINE void store(bf16* p, F32 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
FATTN_INLINE F32 shift_exponent(F32 t) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(t), 23)); }
FATTN_INLINE F32 load(const uint8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))); }

typedef __m256i U32;
FATTN_INLINE U32 set1_u32(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
FATTN_INLINE U32 load_u32(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
FATTN_INLINE void store_u32(uint32_t* p, U32 v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
FATTN_INLINE U32 xor_u32(U32 a, U32 b) { return _mm256_xor_si256(a, b); }
FATTN_INLINE void multiply_wide(U32 x, U32 m, U32& high, U32& low) {
  const U32 even = _mm256_mul_epu32(x, m), odd = _mm256_mul_epu32(_mm256_shuffle_epi32(x, 0xf5), m);
  high = _mm256_blend_epi32(_mm256_shuffle_epi32(even, 0xf5), odd, 0xaa);
  low = _mm256_blend_epi32(even, _mm256_shuffle_epi32(odd, 0xa0), 0xaa);
}
FATTN_INLINE F32 keep_not_below(F32 x, U32 word, U32 limit) {
  return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_max_epu32(word, limit), word)));
}
FATTN_INLINE F32 keep_if(F32 x, U32 word, U32 bit) {
  return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(word, bit), bit)));
}
FATTN_INLINE F32 where_bit(U32 word, U32 bit, F32 x, F32 y) {
  return _mm256_blendv_ps(y, x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(word, bit), bit)));
}
FATTN_INLINE uint32_t nonzero_bytes(const uint8_t* p) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return ~static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes, _mm256_setzero_si256())));
}

}  // namespace fattn::core::FATTN_ISA

#include "cpu/exp2.h"

namespace fattn::core::FATTN_ISA {

FATTN_INLINE F32 exp2(F32 x) { return exp2_by_magic(x); }
FATTN_INLINE F32 exp2_weight(F32 x) { return _mm256_and_ps(exp2(x), _mm256_cmp_ps(x, set1(kLeastWeight), _CMP_NLT_UQ)); }
FATTN_INLINE void transpose(F32 (&r)[8]) {
  F32 t[8];
  for (int i = 0; i < 8; i += 4) {  // 4 x 4 blocks inside 128-bit lanes
    const F32 a = _mm256_unpacklo_ps(r[i], r[i + 1]), b = _mm256_unpackhi_ps(r[i], r[i + 1]);
    const F32 c = _mm256_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm256_unpackhi_ps(r[i + 2], r[i + 3]);
    t[i] = _mm256_shuffle_ps(a, c, 0x44);
    t[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
    t[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
    t[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
  }
}
FATTN_INLINE F32 sum_each(const F32 (&r)[8]) {
  F32 s[2];
  for (int i = 0; i < 8; i += 4) {  // of four vectors: lane i of each 128 bits has the sum over those of r[i]
    const F32 a = add(_mm256_unpacklo_ps(r[i], r[i + 1]), _mm256_unpackhi_ps(r[i], r[i + 1]));
    const F32 b = add(_mm256_unpacklo_ps(r[i + 2], r[i + 3]), _mm256_unpackhi_ps(r[i + 2], r[i + 3]));
    s[i / 4] = add(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
  }
  return add(_mm256_permute2f128_ps(s[0], s[1], 0x20), _mm256_permute2f128_ps(s[0], s[1], 0x31));
}

}  // namespace fattn::core::FATTN_ISA
