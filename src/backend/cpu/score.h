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
  F32 scale, minus_scale, softcap;
  bool alone;  // a score's bits are the same in any vector
  CappedScore(double magnitude, float cap, bool is_alone = false)
      : scale(set1(static_cast<float>(magnitude / static_cast<double>(cap)))), minus_scale(sub(zero(), scale)), softcap(set1(cap)), alone(is_alone) {}
};
// tanh(x). Below 0.5, where softcap leaves most scores, an odd polynomial (minimax in the relative error, 2e-7), a third of the operations. Otherwise
// x P(x^2) / Q(x^2): minimax in the relative error for |x| <= 8.95, beyond which it is 1; 2.1e-8, and 3.5e-7 in fp32 with these coefficients. max
// passes NaN on.
FATTN_INLINE F32 shaped(const CappedScore& s, F32 product) {
  const F32 small = mul(product, s.scale), one = set1(1.0f);
  if (!s.alone && all_smaller(small, 0.5f)) {
    const F32 u = mul(small, small);
    F32 p = fma(set1(0.0171313443f), u, set1(-0.0529842388f));
    p = fma(p, u, set1(0.133247505f));
    p = fma(p, u, set1(-0.333330679f));
    return mul(small, fma(p, u, set1(0.999999987f)));
  }
  const F32 least = set1(-8.95f);
  const F32 x = max(least, sub(zero(), max(least, mul(product, s.minus_scale))));
  const F32 u = mul(x, x);
  F32 p = set1(1.33550895e-08f), q = set1(7.77675609e-07f);
  p = fma(p, u, set1(2.06094683e-05f));
  q = fma(q, u, set1(0.000328567636f));
  p = fma(p, u, set1(0.00349561498f));
  q = fma(q, u, set1(0.0258770883f));
  p = fma(p, u, set1(0.13381049f));
  q = fma(q, u, set1(0.467143655f));
  p = fma(p, u, one);
  q = fma(q, u, one);
  return div(mul(x, p), q);
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
