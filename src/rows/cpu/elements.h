// Elements of any dtype that kernels of a CPU know, as rows of fp32 and back, over a Vec layer.
#pragma once

#include "rows/kernels.h"

namespace fattn::core::FATTN_ISA::rows {

// Calls body(p) with p of the dtype's type, `element` elements from `base`.
template <class Body>
FATTN_INLINE void with_elements(const void* base, int32_t dtype, int64_t element, const Body& body) {
  if (dtype == FATTN_F32) return body(static_cast<const float*>(base) + element);
  if (dtype == FATTN_F16) return body(static_cast<const f16*>(base) + element);
  body(static_cast<const bf16*>(base) + element);
}
template <class Body>
FATTN_INLINE void with_elements(void* base, int32_t dtype, int64_t element, const Body& body) {
  if (dtype == FATTN_F32) return body(static_cast<float*>(base) + element);
  if (dtype == FATTN_F16) return body(static_cast<f16*>(base) + element);
  body(static_cast<bf16*>(base) + element);
}

template <class E>
static void widen(const E* from, int n, float* to) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i));
  for (; i < n; ++i) to[i] = to_float(from[i]);
}
// factor * from
template <class E>
static void narrow(const float* from, float factor, int n, E* to) {
  const F32 factors = set1(factor);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, mul(load(from + i), factors));
  for (; i < n; ++i) from_float(from[i] * factor, to + i);
}
// sums += weight * x
template <class E>
static void add_weighted(const E* x, float weight, int n, float* sums) {
  const F32 weights = set1(weight);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(sums + i, fma(load(x + i), weights, load(sums + i)));
  for (; i < n; ++i) sums[i] += to_float(x[i]) * weight;
}
template <class E>
static float dot_of(const E* x, const float* y, int n) {
  F32 sums = zero();
  float rest = 0;
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) sums = fma(load(x + i), load(y + i), sums);
  for (; i < n; ++i) rest += to_float(x[i]) * y[i];
  return sum(sums) + rest;
}

}  // namespace fattn::core::FATTN_ISA::rows
