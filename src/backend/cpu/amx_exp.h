// exp2, log and the conversion of weights to bf16 on vectors of 16 lanes, as the AMX kernels want them.
#pragma once

#include "backend/cpu/amx_tile.h"

namespace fattn::core::amx {

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;
// Scores are scaled to fixed point with 15 fractional bits, so that adding bits is multiplying by a power of 2.
constexpr float kFixed = 32768.0f;
// Of weights that are multiplied: a product below fp32's normal numbers stops an Intel processor for some 150 cycles. Of a row's greatest weight,
// which is 1 or so, the difference is nothing.
constexpr float kSmallestFactor = -100.0f * kFixed;

// For the backward pass: 2^(u / 2^15) for exponents within [-126, 60), at least 2^-100, relative error 1.2e-4 (weights are rounded to bf16, 2e-3);
// NaN gives nonsense. Adding 1.5 * 2^23 leaves the fixed-point number n + f (f in [0, 1)) in the low bits; a byte shuffle moves it to where a float
// keeps exponent and mantissa: these are the bits of 2^n (1 + f). What is missing, the bias of the exponent and 2^f - 1 - f, comes with the bits of a
// cubic in g = 1 + f around -2^64. The additional 64 of the magic number and that scale cancel the magic number's own bits. A product of AMX takes
// the second floating-point port from the vector units: hence so few floating-point operations.
FATTN_AMX_INLINE __m512 exp2_coarse(__m512 u) {
  constexpr float magic = 12582912.0f + 64.0f * kFixed;
  const __m512 t = _mm512_add_ps(_mm512_max_ps(u, _mm512_set1_ps(kSmallestFactor)), _mm512_set1_ps(magic));
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

// For the forward pass, whose sums are lse: 2^(u / 2^15) to fp32 accuracy (2e-7, exactly 1 at 0) for exponents within [-125, 127).
// Adding 1.5 * 2^23 steps of 1/32 rounds to these steps; the low bits are then n and i of 2^(n + i / 32), which a table and an addition to its
// exponent give, and for the rest r, at most 1/64, a quadratic does. Six of nine operations are floating-point ones.
constexpr float kStep = kFixed / 32.0f, kStepMagic = 12582912.0f * kStep;
constexpr float kSmallestExponent = -125.0f * kFixed;  // no result is below fp32's normal numbers
// The bits of 2^(i / 32), less i << 18.
alignas(64) constexpr uint32_t kPowers[32] = {0x3f800000u, 0x3f7ecd87u, 0x3f7daac3u, 0x3f7c980fu, 0x3f7b95c2u, 0x3f7aa43au, 0x3f79c3d3u, 0x3f78f4f0u,
                                              0x3f7837f0u, 0x3f778d3au, 0x3f76f532u, 0x3f767043u, 0x3f75fed7u, 0x3f75a15bu, 0x3f75583fu, 0x3f7523f6u,
                                              0x3f7504f3u, 0x3f74fbafu, 0x3f7508a4u, 0x3f752c4du, 0x3f75672au, 0x3f75b9beu, 0x3f76248cu, 0x3f76a81eu,
                                              0x3f7744fdu, 0x3f77fbb8u, 0x3f78ccdfu, 0x3f79b907u, 0x3f7ac0c7u, 0x3f7be4bau, 0x3f7d257du, 0x3f7e83b3u};

// 2^((rounded + rest) / 2^15), where `magic` is rounded + kStepMagic.
FATTN_AMX_INLINE __m512 exp2_of_steps(__m512 magic, __m512 rest) {
  const __m512i steps = _mm512_castps_si512(magic);
  const __m512i power = _mm512_permutex2var_epi32(_mm512_load_si512(kPowers), steps, _mm512_load_si512(kPowers + 16));
  const __m512 scale = _mm512_castsi512_ps(_mm512_add_epi32(power, _mm512_slli_epi32(steps, 18)));
  __m512 p = _mm512_fmadd_ps(rest, _mm512_set1_ps(0.240226507f / kFixed / kFixed), _mm512_set1_ps(0.6931555f / kFixed));
  p = _mm512_fmadd_ps(rest, p, _mm512_set1_ps(1.0f));
  return _mm512_mul_ps(p, scale);
}

// 2^(s * scale / 2^15), without rounding the product.
FATTN_AMX_INLINE __m512 exp2_of_product(__m512 s, __m512 scale) {
  const __m512 magic = _mm512_fmadd_ps(s, scale, _mm512_set1_ps(kStepMagic));
  return exp2_of_steps(magic, _mm512_fmsub_ps(s, scale, _mm512_sub_ps(magic, _mm512_set1_ps(kStepMagic))));
}

// 2^(u / 2^15), at least 2^-125; NaN gives nonsense.
FATTN_AMX_INLINE __m512 exp2_fixed(__m512 u) {
  const __m512 x = _mm512_max_ps(u, _mm512_set1_ps(kSmallestExponent)), magic = _mm512_add_ps(x, _mm512_set1_ps(kStepMagic));
  return exp2_of_steps(magic, _mm512_sub_ps(x, _mm512_sub_ps(magic, _mm512_set1_ps(kStepMagic))));
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
