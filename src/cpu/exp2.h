// 2^x for x <= 0 over a Vec layer; included by the vec_*.h after their arithmetic.
#pragma once

namespace fattn::core::FATTN_ISA {

// Least exponent of exp2_weight. What smaller results are multiplied into would soon be subnormal numbers of fp32, and a processor stops for a
// hundred cycles at each.
constexpr float kLeastWeight = -100.0f;

// 2^f for f in [-0.5, 0.5]: minimax in the relative error (9.2e-8, 1.1e-7 with these coefficients), exactly 1 at 0.
FATTN_INLINE F32 exp2_polynomial(F32 f) {
  F32 p = set1(0.00132647273f);
  p = fma(p, f, set1(0.00967151299f));
  p = fma(p, f, set1(0.0555073358f));
  p = fma(p, f, set1(0.240222424f));
  p = fma(p, f, set1(0.693147004f));
  return fma(p, f, set1(1.0f));
}

// Adding 1.5 * 2^23 + 127 rounds x to the integer n and leaves n + 127, the exponent of 2^n, in the lowest bits. At
// n = -127 that is the exponent of 0. The clamp passes NaN on (max returns its second operand), and NaN * anything is NaN.
FATTN_INLINE F32 exp2_by_magic(F32 x) {
  const F32 magic = set1(12582912.0f + 127.0f);
  const F32 clamped = max(set1(-127.0f), x);
  const F32 shifted = add(clamped, magic);
  const F32 n = sub(shifted, magic);
  return mul(exp2_polynomial(sub(clamped, n)), shift_exponent(shifted));
}

}  // namespace fattn::core::FATTN_ISA
