// What training does to a row: gradients of activations, LayerNorm and cross-entropy, sums, a step of the optimizer.
#pragma once

#include <math.h>
#include <stdint.h>

#include "ops/cpu/kernels.h"

namespace fattn::core::FATTN_ISA::ops {

template <class E>
static void narrow_of(const float* x, int64_t n, E* to) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, load(x + i));
  for (; i < n; ++i) from_float(x[i], to + i);
}

// Up to kLanes elements as a vector, with 0 behind them; and back.
template <class E>
FATTN_INLINE F32 load_some(const E* p, int64_t count) {
  E some[kLanes] = {};
  __builtin_memcpy(some, p, static_cast<size_t>(count) * sizeof(E));
  return load(some);
}
template <class E>
FATTN_INLINE void store_some(E* p, int64_t count, F32 x) {
  E some[kLanes];
  store(some, x);
  __builtin_memcpy(p, some, static_cast<size_t>(count) * sizeof(E));
}

FATTN_INLINE F32 min(F32 a, F32 b) { return mul(set1(-1.0f), max(mul(set1(-1.0f), a), mul(set1(-1.0f), b))); }

// y = x s(x): y, and the slope of it. Beyond |x| = 32 the slope is 0 or 1 in fp32, and the square of x cannot overflow this side of it.
FATTN_INLINE F32 gelu_and_slope(fattn::ops::KernelActivation activation, F32 x, F32* slope) {
  const F32 near = min(set1(32.0f), max(set1(-32.0f), x));
  if (activation == fattn::ops::kGeluByTanh) {
    const F32 square = mul(near, near);
    const F32 u2 = mul(mul(set1(1.5957691216f), near), fma(square, set1(0.044715f), set1(1.0f)));
    F32 steep;
    const F32 share = logistic(u2, &steep);
    const F32 du2 = mul(set1(1.5957691216f), fma(square, set1(3 * 0.044715f), set1(1.0f)));
    *slope = fma(mul(near, steep), du2, share);
    return mul(x, share);
  }
  F32 bell;
  const F32 share = normal_share(near, &bell);
  *slope = fma(mul(near, set1(0.39894228f)), bell, share);
  return mul(x, share);
}

template <class E>
static void activate_of(fattn::ops::KernelActivation activation, const E* x, int64_t n, E* y) {
  F32 slope;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(y + i, gelu_and_slope(activation, load(x + i), &slope));
  if (i < n) store_some(y + i, n - i, gelu_and_slope(activation, load_some(x + i, n - i), &slope));
}

template <class E>
static void activation_gradient_of(fattn::ops::KernelActivation activation, const E* x, const E* dy, int64_t n, E* dx, E* y) {
  F32 slope;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const F32 value = gelu_and_slope(activation, load(x + i), &slope);
    store(dx + i, mul(load(dy + i), slope));
    if (y) store(y + i, value);
  }
  if (i == n) return;
  const F32 value = gelu_and_slope(activation, load_some(x + i, n - i), &slope);
  store_some(dx + i, n - i, mul(load_some(dy + i, n - i), slope));
  if (y) store_some(y + i, n - i, value);
}

static void add_to(const float* x, int64_t n, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, add(load(to + i), load(x + i)));
  for (; i < n; ++i) to[i] += x[i];
}

// Sums of kRowsOfSum rows are added to others, so that a sum of many rows loses little.
constexpr int64_t kRowsOfSum = 128;
template <class E>
static void column_sums_of(const E* x, int64_t stride, int64_t rows, int64_t columns, float* to) {
  for (int64_t begin = 0; begin < rows; begin += kRowsOfSum) {
    const int64_t end = rows - begin < kRowsOfSum ? rows : begin + kRowsOfSum;
    int64_t c = 0;
    for (; c + 4 * kLanes <= columns; c += 4 * kLanes) {
      F32 sums[4] = {zero(), zero(), zero(), zero()};
      for (int64_t r = begin; r < end; ++r)
        for (int v = 0; v < 4; ++v) sums[v] = add(sums[v], load(x + r * stride + c + v * kLanes));
      for (int v = 0; v < 4; ++v) store(to + c + v * kLanes, add(load(to + c + v * kLanes), sums[v]));
    }
    for (; c < columns; ++c) {
      float one = 0;
      for (int64_t r = begin; r < end; ++r) one += to_float(x[r * stride + c]);
      to[c] += one;
    }
  }
}

// With n = (x - mean) factor: dn = dy weight, dx += factor (dn - mean(dn) - n mean(dn n)).
template <class E>
static void norm_gradient_of(const fattn::ops::NormGradientTask& t) {
  const int64_t n = t.width, whole = n / kLanes * kLanes, rest = n - whole;
  const E* weight = static_cast<const E*>(t.weight);
  const float share = 1.0f / static_cast<float>(n);
  for (int64_t r = 0; r < t.rows; ++r) {
    const float *x = t.x + r * n, *dy = t.dy + r * n;
    float* dx = t.dx + r * n;
    F32 sums = zero();
    for (int64_t i = 0; i < whole; i += kLanes) sums = add(sums, load(x + i));
    if (rest > 0) sums = add(sums, load_some(x + whole, rest));
    const F32 mean = set1(sum(sums) * share);
    F32 squares = zero(), dsums = zero(), dots = zero();
    const auto gather = [&](F32 difference, F32 dn) {
      squares = fma(difference, difference, squares);
      dsums = add(dsums, dn);
      dots = fma(dn, difference, dots);
    };
    for (int64_t i = 0; i < whole; i += kLanes) gather(sub(load(x + i), mean), mul(load(dy + i), load(weight + i)));
    if (rest > 0)
      gather(keep_below(sub(load_some(x + whole, rest), mean), static_cast<int>(rest), zero()),
             mul(load_some(dy + whole, rest), load_some(weight + whole, rest)));
    const float one_factor = 1.0f / sqrtf(sum(squares) * share + t.epsilon);
    const F32 factor = set1(one_factor), dmean = set1(sum(dsums) * share), dot = set1(sum(dots) * one_factor * share);
    const auto change = [&](F32 normal, F32 dn) { return mul(factor, sub(sub(dn, dmean), mul(normal, dot))); };
    for (int64_t i = 0; i < whole; i += kLanes) {
      const F32 normal = mul(sub(load(x + i), mean), factor), d = load(dy + i);
      store(dx + i, add(load(dx + i), change(normal, mul(d, load(weight + i)))));
      store(t.dweight + i, fma(d, normal, load(t.dweight + i)));
      store(t.dbias + i, add(load(t.dbias + i), d));
    }
    if (rest == 0) continue;
    const F32 normal = mul(sub(load_some(x + whole, rest), mean), factor), d = load_some(dy + whole, rest);
    store_some(dx + whole, rest, add(load_some(dx + whole, rest), change(normal, mul(d, load_some(weight + whole, rest)))));
    store_some(t.dweight + whole, rest, fma(d, normal, load_some(t.dweight + whole, rest)));
    store_some(t.dbias + whole, rest, add(load_some(t.dbias + whole, rest), d));
  }
}

static void softmax_of(const fattn::ops::SoftmaxTask& t) {
  const int64_t n = t.vocab, whole = n / kLanes * kLanes;
  float* x = t.logits;
  const float target = t.target >= 0 ? x[t.target] : 0.0f;
  float total = 0, top = 0;
  exp_sum_of(x, n, &top, &total);
  // A number that is not finite makes a NaN with 0.
  F32 sizes = zero(), flaws = zero();
  for (int64_t i = 0; i < whole; i += kLanes) {
    const F32 v = load(x + i);
    sizes = max(sizes, max(v, mul(v, set1(-1.0f))));
    flaws = fma(v, zero(), flaws);
  }
  float size = largest_lane(sizes), flaw = sum(flaws);
  for (int64_t i = whole; i < n; ++i) {
    size = fabsf(x[i]) > size ? fabsf(x[i]) : size;
    flaw += x[i] * 0.0f;
  }
  *t.largest = size + flaw;
  *t.loss = t.target < 0 ? 0.0f : (logf(total) + (top - target)) + flaw;
  if (!t.gradient) return;
  const float factor = t.target < 0 ? 0.0f : t.scale / total;
  const F32 tops = set1(top), log2e = set1(1.44269504f), factors = set1(factor);
  for (int64_t i = 0; i < whole; i += kLanes) store(x + i, mul(exp2(mul(sub(load(x + i), tops), log2e)), factors));
  if (whole < n) store_some(x + whole, n - whole, mul(exp2(mul(sub(load_some(x + whole, n - whole), tops), log2e)), factors));
  if (t.target >= 0) x[t.target] -= t.scale;
}

template <class E>
static void adamw_of(const fattn::ops::AdamWTask& t) {
  E* weight = static_cast<E*>(t.weight);
  const F32 scale = set1(t.scale), take_m = set1(t.take_m), take_v = set1(t.take_v), step_m = set1(t.step_m), step_v = set1(t.step_v);
  const F32 epsilon = set1(t.epsilon), keep_less = set1(t.keep_less);
  const auto stepped = [&](F32 gradient, F32 w, F32& m, F32& v) {
    const F32 g = mul(gradient, scale);
    m = fma(take_m, sub(g, m), m);
    v = fma(take_v, sub(mul(g, g), v), v);
    const F32 change = div(mul(step_m, m), add(sqrt(mul(v, step_v)), epsilon));
    return add(fma(w, keep_less, w), change);
  };
  int64_t i = 0;
  for (; i + kLanes <= t.n; i += kLanes) {
    F32 m = load(t.m + i), v = load(t.v + i);
    const F32 w = stepped(load(t.gradient + i), load(t.master + i), m, v);
    store(t.m + i, m);
    store(t.v + i, v);
    store(t.master + i, w);
    if (weight) store(weight + i, w);
  }
  if (i == t.n) return;
  const int64_t rest = t.n - i;
  F32 m = load_some(t.m + i, rest), v = load_some(t.v + i, rest);
  const F32 w = stepped(load_some(t.gradient + i, rest), load_some(t.master + i, rest), m, v);
  store_some(t.m + i, rest, m);
  store_some(t.v + i, rest, v);
  store_some(t.master + i, rest, w);
  if (weight) store_some(weight + i, rest, w);
}

}  // namespace fattn::core::FATTN_ISA::ops
