// What becomes of a product q k before the softmax: the score functions of the CPU kernels. A loop over products takes one of the types below and
// calls, for a vector of products,
//   t = shaped(function, product)     what value and gradient both need
//   plus(function, t, x)              score + x
//   through(function, t, g)           g times the derivative of the score by softmax_scale q k
#pragma once

#include <stdint.h>

#include "backend/cpu/kernels.h"

namespace fattn::core::FATTN_ISA {

constexpr float kLog2E = 1.44269504088896340736f;

// softmax_scale as the kernels apply it. Products take Q with its sign flipped for a negative scale (all zeros for a scale of 0), so that Q stays
// exact. The rest of the scale enters with the exponentials, or where scores are capped.
struct Scale {
  float sign;        // 1, -1 or 0
  double magnitude;  // |softmax_scale|, 1 for 0: what is left to do to a product
  explicit Scale(float scale)
      : sign(scale == 0.0f ? 0.0f
             : scale < 0   ? -1.0f
                           : 1.0f),
        magnitude(scale == 0.0f ? 1.0 : static_cast<double>(scale < 0 ? -scale : scale)) {}
};

// Is there something to add to scores?
FATTN_INLINE bool adds(const ScoreInputs& in) { return in.alibi_slopes || in.bias; }
// May that be -Inf, which hides, or does a mask?
FATTN_INLINE bool hides(const ScoreInputs& in) { return in.bias || in.mask; }
FATTN_INLINE bool is_plain(const ScoreInputs& in) { return !adds(in) && !in.mask && in.dropout_below == 0; }

// score = |softmax_scale| product
struct ScaledScore {
  F32 scale;
  explicit ScaledScore(double magnitude) : scale(set1(static_cast<float>(magnitude))) {}
};
FATTN_INLINE F32 shaped(const ScaledScore&, F32 product) { return product; }
FATTN_INLINE F32 plus(const ScaledScore& f, F32 t, F32 x) { return fma(t, f.scale, x); }
FATTN_INLINE F32 through(const ScaledScore&, F32, F32 g) { return g; }

// score = softcap tanh(|softmax_scale| product / softcap); what is shaped is the hyperbolic tangent.
struct CappedScore {
  F32 exponent, softcap;
  CappedScore(double magnitude, float cap)
      : exponent(set1(static_cast<float>(2 * 1.4426950408889634 * magnitude / static_cast<double>(cap)))), softcap(set1(cap)) {}
};
// With e = 2^y, y = 2 log2(e) x: tanh(x) = (e - 1) / (e + 1). Written as 2^n (2^f - 1) + (2^n - 1), e - 1 keeps its digits where e is near 1. Beyond
// |y| = 40 fp32 says 1 or -1; max passes NaN on.
FATTN_INLINE F32 shaped(const CappedScore& s, F32 product) {
  const F32 most = set1(40.0f), magic = set1(12582912.0f + 127.0f);
  const F32 above = max(set1(-40.0f), mul(product, s.exponent));
  const F32 y = sub(zero(), max(sub(zero(), most), sub(zero(), above)));
  const F32 shifted = add(y, magic);
  const F32 power = shift_exponent(shifted), f = sub(y, sub(shifted, magic));
  // (2^f - 1) / f for f in [-0.5, 0.5]: minimax in the relative error, 2.1e-8 with these coefficients.
  F32 p = set1(0.000154035122f);
  p = fma(p, f, set1(0.00133907353f));
  p = fma(p, f, set1(0.00961823761f));
  p = fma(p, f, set1(0.0555035733f));
  p = fma(p, f, set1(0.240226492f));
  p = fma(p, f, set1(0.693147182f));
  const F32 less_one = fma(mul(power, p), f, sub(power, set1(1.0f)));
  return div(less_one, add(less_one, set1(2.0f)));
}
FATTN_INLINE F32 plus(const CappedScore& s, F32 t, F32 x) { return fma(t, s.softcap, x); }
FATTN_INLINE F32 through(const CappedScore&, F32 t, F32 g) { return mul(g, fma(sub(zero(), t), t, set1(1.0f))); }

// The exponentials' part of a score: exp(score - largest score) = exp2((s - largest s) * factor), where s is the product itself if only the scale is
// left to do, else the whole score.
struct Exponent {
  double magnitude;  // score = magnitude * s
  float factor;      // magnitude * log2(e)
  template <class Task>
  explicit Exponent(const Task& task)
      : magnitude(task.softcap > 0 || adds(task.inputs) ? 1.0 : Scale(task.scale).magnitude),
        factor(static_cast<float>(magnitude * 1.4426950408889634)) {}
};

}  // namespace fattn::core::FATTN_ISA
