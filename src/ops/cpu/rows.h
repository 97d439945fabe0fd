// What is done to a row: normalised, activated, looked up, summed up as exponentials.
#pragma once

#include <math.h>
#include <stdint.h>

#include "ops/cpu/kernels.h"

namespace fattn::core::FATTN_ISA::ops {

// exp(-|x|); NaN stays.
FATTN_INLINE F32 exp_of_minus(F32 x) {
  const F32 size = max(mul(x, set1(-1.0f)), x);
  return exp2(mul(size, set1(-1.44269504f)));
}

// 1 / (1 + exp(-x)), and its slope. The exponential is of -|x|, so that it cannot overflow.
FATTN_INLINE F32 logistic(F32 x, F32* slope) {
  const F32 e = exp_of_minus(x);
  const F32 above = div(set1(1.0f), add(set1(1.0f), e));
  const F32 below = mul(e, above);
  *slope = mul(below, above);
  return where_equal(max(x, zero()), x, above, below);
}

// x / (1 + exp(-2 u)) with u = sqrt(2 / pi) (x + 0.044715 x^3) is x (1 + tanh(u)) / 2.
FATTN_INLINE F32 gelu_by_tanh(F32 x) {
  const F32 u2 = mul(mul(set1(1.5957691216f), x), fma(mul(x, x), set1(0.044715f), set1(1.0f)));
  F32 slope;
  return mul(x, logistic(u2, &slope));
}

// The share of a normal distribution below x, and exp(-x^2 / 2). erf by Abramowitz and Stegun 7.1.26, absolute error 1.5e-7: as good as fp32
// beside 1.
FATTN_INLINE F32 normal_share(F32 x, F32* bell) {
  const F32 z = mul(x, set1(0.70710678f));
  const F32 size = max(mul(z, set1(-1.0f)), z);
  const F32 t = div(set1(1.0f), fma(size, set1(0.3275911f), set1(1.0f)));
  F32 p = set1(1.061405429f);
  p = fma(p, t, set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = fma(p, t, set1(0.254829592f));
  *bell = exp2(mul(mul(z, z), set1(-1.44269504f)));
  const F32 tail = mul(mul(mul(p, t), set1(0.5f)), *bell);  // (1 - erf(|z|)) / 2
  const F32 positive = max(z, zero());
  return where_equal(positive, z, sub(set1(1.0f), tail), tail);
}
FATTN_INLINE F32 gelu_by_erf(F32 x) {
  F32 bell;
  return mul(x, normal_share(x, &bell));
}

// Mean and variance in two passes over the row, so that nothing cancels.
template <class E>
static void norm_row_of(const fattn::ops::NormTask& t) {
  const int64_t n = t.width, whole = n / kLanes * kLanes;
  float* x = t.x;
  const E* delta = static_cast<const E*>(t.delta);
  F32 sums = zero();
  float rest = 0;
  for (int64_t i = 0; i < whole; i += kLanes) {
    F32 v = load(x + i);
    if (t.add) {
      v = add(v, load(delta + i));
      store(x + i, v);
    }
    sums = add(sums, v);
  }
  for (int64_t i = whole; i < n; ++i) {
    if (t.add) x[i] += to_float(delta[i]);
    rest += x[i];
  }
  const float mean = (sum(sums) + rest) / static_cast<float>(n);
  F32 squares = zero();
  rest = 0;
  for (int64_t i = 0; i < whole; i += kLanes) {
    const F32 d = sub(load(x + i), set1(mean));
    squares = fma(d, d, squares);
  }
  for (int64_t i = whole; i < n; ++i) rest += (x[i] - mean) * (x[i] - mean);
  const float variance = (sum(squares) + rest) / static_cast<float>(n);
  const float factor = 1.0f / sqrtf(variance + t.epsilon);
  const E *weight = static_cast<const E*>(t.weight), *bias = static_cast<const E*>(t.bias);
  E* y = static_cast<E*>(t.y);
  for (int64_t i = 0; i < whole; i += kLanes) store(y + i, fma(mul(sub(load(x + i), set1(mean)), set1(factor)), load(weight + i), load(bias + i)));
  for (int64_t i = whole; i < n; ++i) from_float((x[i] - mean) * factor * to_float(weight[i]) + to_float(bias[i]), y + i);
}

template <class E>
static void embed_row_of(const void* first, const void* second, int64_t n, float* to) {
  const E *a = static_cast<const E*>(first), *b = static_cast<const E*>(second);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, b ? add(load(a + i), load(b + i)) : load(a + i));
  for (; i < n; ++i) to[i] = to_float(a[i]) + (b ? to_float(b[i]) : 0.0f);
}

// NaN and Inf go through: the sum is NaN then.
static inline void exp_sum_of(const float* logits, int64_t n, float* largest, float* total) {
  float top = logits[0];
  for (int64_t i = 1; i < n; ++i) top = logits[i] > top ? logits[i] : top;
  const F32 tops = set1(top), scale = set1(1.44269504f);
  F32 sums = zero();
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) sums = add(sums, exp2(mul(sub(load(logits + i), tops), scale)));
  float rest = 0;
  for (; i < n; ++i) rest += exp2f((logits[i] - top) * 1.44269504f);
  *largest = top;
  *total = sum(sums) + rest;
}

}  // namespace fattn::core::FATTN_ISA::ops
