// Vec layer for AVX-512 (F, BW, VL, DQ); with FATTN_DOT also VDPBF16PS. Names: vec_types.h.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "cpu/vec_types.h"

namespace fattn::core::FATTN_ISA {

typedef __m512 F32;
constexpr int kLanes = 16;
constexpr int kPanelVecs = 4;  // 6 x 4 accumulators of 32 registers
constexpr bool kFetchesAhead = true;
constexpr int64_t kInPlace = 0;

#define FATTN_INLINE static inline __attribute__((always_inline))

FATTN_INLINE F32 set1(float x) { return _mm512_set1_ps(x); }
FATTN_INLINE F32 zero() { return _mm512_setzero_ps(); }
FATTN_INLINE F32 load(const float* p) { return _mm512_loadu_ps(p); }
FATTN_INLINE void store(float* p, F32 v) { _mm512_storeu_ps(p, v); }
FATTN_INLINE F32 add(F32 a, F32 b) { return _mm512_add_ps(a, b); }
FATTN_INLINE F32 sub(F32 a, F32 b) { return _mm512_sub_ps(a, b); }
FATTN_INLINE F32 mul(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
FATTN_INLINE F32 div(F32 a, F32 b) { return _mm512_div_ps(a, b); }
FATTN_INLINE F32 sqrt(F32 a) { return _mm512_sqrt_ps(a); }
FATTN_INLINE F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
FATTN_INLINE F32 max(F32 a, F32 b) { return _mm512_max_ps(a, b); }
FATTN_INLINE bool all_smaller(F32 x, float limit) { return _mm512_cmp_ps_mask(_mm512_abs_ps(x), set1(limit), _CMP_NLT_UQ) == 0; }
FATTN_INLINE F32 where_equal(F32 a, F32 b, F32 x, F32 y) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ), y, x); }
FATTN_INLINE F32 keep_from(F32 x, int first, F32 other) {
  const __mmask16 keep = first <= 0 ? 0xffffu : first >= 16 ? 0u : static_cast<__mmask16>(0xffffu << first);
  return _mm512_mask_blend_ps(keep, other, x);
}
FATTN_INLINE F32 keep_below(F32 x, int end, F32 other) {
  const __mmask16 keep = end <= 0 ? 0u : end >= 16 ? 0xffffu : static_cast<__mmask16>((1u << end) - 1u);
  return _mm512_mask_blend_ps(keep, other, x);
}
FATTN_INLINE float sum(F32 v) { return _mm512_reduce_add_ps(v); }
FATTN_INLINE float largest_lane(F32 v) { return _mm512_reduce_max_ps(v); }
FATTN_INLINE F32 load(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
FATTN_INLINE F32 load(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
FATTN_INLINE void store(f16* p, F32 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// fp32 bits rounded to bf16, in the high half of each lane; NaN becomes a quiet NaN.
FATTN_INLINE __m512i round_bf16(F32 v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  return _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), bits, _mm512_set1_epi32(0x400000));
}
FATTN_INLINE void store(bf16* p, F32 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_bf16(v), 16)));
}
FATTN_INLINE F32 shift_exponent(F32 t) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(t), 23)); }
FATTN_INLINE F32 load(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))); }

typedef __m512i U32;
FATTN_INLINE U32 set1_u32(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
FATTN_INLINE U32 load_u32(const uint32_t* p) { return _mm512_loadu_si512(p); }
FATTN_INLINE void store_u32(uint32_t* p, U32 v) { _mm512_storeu_si512(p, v); }
FATTN_INLINE U32 xor_u32(U32 a, U32 b) { return _mm512_xor_si512(a, b); }
FATTN_INLINE void multiply_wide(U32 x, U32 m, U32& high, U32& low) {
  constexpr auto kHighDown = static_cast<_MM_PERM_ENUM>(_MM_SHUFFLE(3, 3, 1, 1)), kLowUp = static_cast<_MM_PERM_ENUM>(_MM_SHUFFLE(2, 2, 0, 0));
  const U32 even = _mm512_mul_epu32(x, m), odd = _mm512_mul_epu32(_mm512_shuffle_epi32(x, kHighDown), m);
  high = _mm512_mask_shuffle_epi32(odd, 0x5555, even, kHighDown);
  low = _mm512_mask_shuffle_epi32(even, 0xaaaa, odd, kLowUp);
}
FATTN_INLINE F32 keep_not_below(F32 x, U32 word, U32 limit) { return _mm512_maskz_mov_ps(_mm512_cmpge_epu32_mask(word, limit), x); }
FATTN_INLINE F32 keep_if(F32 x, U32 word, U32 bit) { return _mm512_maskz_mov_ps(_mm512_test_epi32_mask(word, bit), x); }
FATTN_INLINE F32 where_bit(U32 word, U32 bit, F32 x, F32 y) { return _mm512_mask_blend_ps(_mm512_test_epi32_mask(word, bit), y, x); }
FATTN_INLINE uint32_t nonzero_bytes(const uint8_t* p) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm256_test_epi8_mask(bytes, bytes);
}

}  // namespace fattn::core::FATTN_ISA

#include "cpu/exp2.h"

namespace fattn::core::FATTN_ISA {

// Rounds to nearest and scales by the exponent. Below 2^-125 the mask gives 0, because an underflow in VSCALEFPS costs
// some hundred cycles (and -inf - -inf in the argument of the polynomial is masked too); NaN is not below.
FATTN_INLINE __mmask16 has_exp2(F32 x) { return _mm512_cmp_ps_mask(x, _mm512_set1_ps(-125.0f), _CMP_NLT_UQ); }
FATTN_INLINE F32 exp2(F32 x) {
  const F32 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm512_maskz_scalef_ps(has_exp2(x), exp2_polynomial(sub(x, n)), n);
}
FATTN_INLINE F32 exp2_weight(F32 x) {
  const F32 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, set1(kLeastWeight), _CMP_NLT_UQ), exp2_polynomial(sub(x, n)), n);
}
FATTN_INLINE void transpose(F32 (&r)[16]) {
  F32 t[16];
  for (int i = 0; i < 16; i += 4) {  // 4 x 4 blocks inside 128-bit lanes
    const F32 a = _mm512_unpacklo_ps(r[i], r[i + 1]), b = _mm512_unpackhi_ps(r[i], r[i + 1]);
    const F32 c = _mm512_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm512_unpackhi_ps(r[i + 2], r[i + 3]);
    t[i] = _mm512_shuffle_ps(a, c, 0x44);
    t[i + 1] = _mm512_shuffle_ps(a, c, 0xee);
    t[i + 2] = _mm512_shuffle_ps(b, d, 0x44);
    t[i + 3] = _mm512_shuffle_ps(b, d, 0xee);
  }
  for (int i = 0; i < 4; ++i) {  // 4 x 4 lanes of 128 bits
    const F32 a = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x44), b = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xee);
    const F32 c = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x44), d = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xee);
    r[i] = _mm512_shuffle_f32x4(a, c, 0x88);
    r[i + 4] = _mm512_shuffle_f32x4(a, c, 0xdd);
    r[i + 8] = _mm512_shuffle_f32x4(b, d, 0x88);
    r[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
  }
}

// By adding halves: 30 shuffles, where a transposition takes 64.
FATTN_INLINE F32 sum_each(const F32 (&r)[16]) {
  F32 s[4];
  for (int i = 0; i < 16; i += 4) {  // of four vectors: lane i of each 128 bits has the sum over those of r[i]
    const F32 a = add(_mm512_unpacklo_ps(r[i], r[i + 1]), _mm512_unpackhi_ps(r[i], r[i + 1]));
    const F32 b = add(_mm512_unpacklo_ps(r[i + 2], r[i + 3]), _mm512_unpackhi_ps(r[i + 2], r[i + 3]));
    s[i / 4] = add(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  }
  const F32 a = add(_mm512_shuffle_f32x4(s[0], s[1], 0x88), _mm512_shuffle_f32x4(s[0], s[1], 0xdd));
  const F32 b = add(_mm512_shuffle_f32x4(s[2], s[3], 0x88), _mm512_shuffle_f32x4(s[2], s[3], 0xdd));
  return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

#ifdef FATTN_DOT
constexpr bool kHasDot = true;
typedef __m512i Pairs;
FATTN_INLINE Pairs load_pairs(const uint32_t* p) { return _mm512_loadu_si512(p); }
FATTN_INLINE Pairs load_pairs(const bf16* p) { return _mm512_loadu_si512(p); }  // of neighbours
FATTN_INLINE void store_pairs(uint32_t* p, Pairs v) { _mm512_storeu_si512(p, v); }
FATTN_INLINE Pairs set1_pair(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
FATTN_INLINE F32 dot(F32 acc, Pairs a, Pairs b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
// Lane i: (lo[i], hi[i]) as bf16, lo in the low half; exact for values that are bf16 already, truncating otherwise.
FATTN_INLINE Pairs make_pairs_exact(F32 lo, F32 hi) {
  const __m512i high_half = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(lo), 16), _mm512_and_si512(_mm512_castps_si512(hi), high_half));
}
// The same, rounded to nearest even (subnormal values become 0, as VDPBF16PS takes them anyway).
FATTN_INLINE Pairs make_pairs(F32 lo, F32 hi) {
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(hi, lo);  // 16 low values, then 16 high values
  const __m512i interleave =
      _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(interleave, both);
}
// Lane i of both together: (a[i], b[i]), where a and b are rows of 2 kLanes values.
FATTN_INLINE void interleave(Pairs a, Pairs b, Pairs& first, Pairs& second) {
  const __m512i low =
      _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_set_epi16(63, 31, 62, 30, 61, 29, 60, 28, 59, 27, 58, 26, 57, 25, 56, 24, 55, 23, 54, 22, 53, 21, 52, 20, 51, 19, 50,
                                        18, 49, 17, 48, 16);
  first = _mm512_permutex2var_epi16(a, low, b);
  second = _mm512_permutex2var_epi16(a, high, b);
}
FATTN_INLINE Pairs finite_halves(Pairs a) {
  const __m512i magnitude = _mm512_and_si512(a, _mm512_set1_epi16(0x7fff));
  return _mm512_maskz_mov_epi16(_mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(0x7f80)), a);
}
FATTN_INLINE Pairs keep_halves(Pairs a, U32 word, int n) {
  return _mm512_maskz_mov_epi16(_mm512_test_epi16_mask(word, _mm512_set1_epi32(0x10001 << n)), a);
}
FATTN_INLINE void store_rounded(bf16* p, F32 v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v)); }
// exp2 with a polynomial of degree 3: relative error 1.1e-4, below half a unit in the last place of bf16;
// exactly 1 at 0.
FATTN_INLINE F32 exp2_coarse(F32 x) {
  const F32 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const F32 f = sub(x, n);
  F32 p = set1(0.0550089329f);
  p = fma(p, f, set1(0.242210954f));
  p = fma(p, f, set1(0.693282902f));
  p = fma(p, f, set1(1.0f));
  return _mm512_maskz_scalef_ps(has_exp2(x), p, n);
}
// The same with degree 4: relative error 2.8e-6. For the forward pass, whose sums are lse.
FATTN_INLINE F32 exp2_of_sum(F32 x) {
  const F32 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const F32 f = sub(x, n);
  F32 p = set1(0.009582853f);
  p = fma(p, f, set1(0.055906426f));
  p = fma(p, f, set1(0.24024099f));
  p = fma(p, f, set1(0.6931242f));
  p = fma(p, f, set1(1.0f));
  return _mm512_maskz_scalef_ps(has_exp2(x), p, n);
}
#else
constexpr bool kHasDot = false;
#endif

}  // namespace fattn::core::FATTN_ISA
