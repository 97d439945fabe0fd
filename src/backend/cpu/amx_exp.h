// exp2, log and the conversion of weights to bf16 on vectors of 16 lanes, as the AMX kernels want them.
#pragma once

#include "backend/cpu/amx_tile.h"

namespace fattn::core::amx {

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;
// Scores are scaled to fixed point with 15 fractional bits, so that adding bits is multiplying by a power of 2.
constexpr float kFixed = 32768.0f;
constexpr float kSmallestExponent = -126.0f * kFixed;
// Of weights that are multiplied: a product below fp32's normal numbers stops an Intel processor for some 150 cycles. Of a row's greatest weight,
// which is 1 or so, the difference is nothing.
constexpr float kSmallestFactor = -100.0f * kFixed;

// 2^(s * scale / 2^15 + shift) for exponents within [-126, 60), relative error 1.2e-4 (weights are rounded to bf16, 2e-3).
// Adding 1.5 * 2^23 leaves the fixed-point number n + f (f in [0, 1)) in the low bits; a byte shuffle moves it to where a
// float keeps exponent and mantissa: these are the bits of 2^n (1 + f). What is missing, the bias of the exponent and
// 2^f - 1 - f, comes with the bits of a cubic in g = 1 + f around -2^64. The additional 64 of the magic number and that
// scale cancel the magic number's own bits.
// A product of AMX takes the second floating-point port from the vector units: hence so few floating-point operations.
constexpr float kMagic = 12582912.0f + 64.0f * kFixed;

FATTN_AMX_INLINE __m512 exp2_of_magic(__m512 t) {
  const __m512i up = _mm512_set4_epi32(0x0e0d0cff, 0x0a0908ff, 0x060504ff, 0x020100ff);  // shifts every 32-bit lane left by 8
  const __m512i i = _mm512_shuffle_epi8(_mm512_castps_si512(t), up);
  const __m512i mantissa = _mm512_set1_epi32(0x007fffff), one = _mm512_set1_epi32(0x3f800000);
  const __m512 g = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(i, mantissa, one, 0xea));  // (i & mantissa) | one
  constexpr float scale = -18446744073709551616.0f;                                         // -2^64
  __m512 q = _mm512_fmadd_ps(g, _mm512_set1_ps(0.039133985f * scale), _mm512_set1_ps(-0.0042481143f * scale));
  q = _mm512_fmadd_ps(g, q, _mm512_set1_ps(-0.26119354f * scale));
  q = _mm512_fmadd_ps(g, q, _mm512_set1_ps(1.2263076f * scale));
  return _mm512_castsi512_ps(_mm512_add_epi32(i, _mm512_castps_si512(q)));
}

// 2^(u / 2^15), at least 2^(smallest / 2^15); NaN gives nonsense.
FATTN_AMX_INLINE __m512 exp2_fixed(__m512 u, float smallest) {
  return exp2_of_magic(_mm512_add_ps(_mm512_max_ps(u, _mm512_set1_ps(smallest)), _mm512_set1_ps(kMagic)));
}

// 2^x to fp32 accuracy for any x; -inf gives 0, NaN stays. For rescaling, where errors would add up.
FATTN_AMX_INLINE __m512 exp2_accurate(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 f = _mm512_sub_ps(x, n);
  f = _mm512_mask_mov_ps(f, _mm512_cmp_ps_mask(x, n, _CMP_EQ_OQ), _mm512_setzero_ps());  // also -inf - -inf
  __m512 p = _mm512_fmadd_ps(f, _mm512_set1_ps(1.54035304e-4f), _mm512_set1_ps(1.33335581e-3f));
  p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(9.61812911e-3f));
  p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(5.55041087e-2f));
  p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(2.40226507e-1f));
  p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(6.93147181e-1f));
  p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

// Natural logarithm of x >= 0 to fp32 accuracy; 0 gives -inf, NaN stays.
FATTN_AMX_INLINE __m512 log_accurate(__m512 x) {
  const __m512 m = _mm512_getmant_ps(x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_src);
  const __m512 e = _mm512_sub_ps(_mm512_getexp_ps(x), _mm512_getexp_ps(m));
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 z = _mm512_div_ps(_mm512_sub_ps(m, one), _mm512_add_ps(m, one)), z2 = _mm512_mul_ps(z, z);
  __m512 p = _mm512_fmadd_ps(z2, _mm512_set1_ps(2.0f / 9.0f), _mm512_set1_ps(2.0f / 7.0f));
  p = _mm512_fmadd_ps(z2, p, _mm512_set1_ps(2.0f / 5.0f));
  p = _mm512_fmadd_ps(z2, p, _mm512_set1_ps(2.0f / 3.0f));
  p = _mm512_fmadd_ps(z2, p, _mm512_set1_ps(2.0f));
  return _mm512_fmadd_ps(e, _mm512_set1_ps(kLn2), _mm512_mul_ps(p, z));  // e is -inf for 0
}

// a and b rounded to bf16 (ties away from zero), a in the low and b in the high half of every 32-bit lane.
FATTN_AMX_INLINE __m512i pair_bf16(__m512 a, __m512 b) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(a), half), 16);
  return _mm512_mask_blend_epi16(0xaaaaaaaau, low, _mm512_add_epi32(_mm512_castps_si512(b), half));
}

// sum + low + high of every lane of such pairs.
FATTN_AMX_INLINE __m512 add_pairs(__m512 sum, __m512i pairs) {
  return _mm512_dpbf16_ps(sum, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32(0x3f803f80));
}

}  // namespace fattn::core::amx
