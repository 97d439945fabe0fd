// Passes of training over numbers that do not see each other: conversion, activations and their gradients, AdamW.
#pragma once

#include "device_abi/training_params.h"
#include "kernels/ops/activation.h"
#include "kernels/ops/begin.h"
#include "kernels/ops/wide.h"

namespace fattn::ops {

// Spec: Element (of x), To, kDependent.
template <class Spec>
__device__ __forceinline__ void convert(const ConvertParams& p) {
  begin_kernel<Spec::kDependent>();
  each_unit(p.count, p.wide != 0, [&](auto unit, long long i) {
    constexpr int kUnit = decltype(unit)::kNumbers;
    float x[kUnit];
    read_unit<typename Spec::Element>(p.x, i, x);
    if (p.bias) {
      const int column = static_cast<int>(i % p.width);
#pragma unroll
      for (int k = 0; k < kUnit; ++k) x[k] += p.bias[column + k < p.width ? column + k : (column + k) % p.width];
    }
    if (p.add) {
      float add[kUnit];
      read_unit<float>(p.add, i, add);
#pragma unroll
      for (int k = 0; k < kUnit; ++k) x[k] += add[k];
    }
    write_unit<typename Spec::To>(p.to, i, x);
  });
}

// Spec: Element, kActivation, kGradient, kDependent.
template <class Spec>
__device__ __forceinline__ void activate(const ActivateParams& p) {
  using Element = typename Spec::Element;
  begin_kernel<Spec::kDependent>();
  each_unit(p.count, p.wide != 0, [&](auto unit, long long i) {
    constexpr int kUnit = decltype(unit)::kNumbers;
    float x[kUnit], y[kUnit];
    read_unit<Element>(p.x, i, x);
    if constexpr (Spec::kGradient) {
      float dx[kUnit];
      read_unit<Element>(p.dy, i, dx);
#pragma unroll
      for (int k = 0; k < kUnit; ++k) {
        const ActivationAt at = activation_at<Spec::kActivation>(x[k]);
        dx[k] *= at.slope;
        y[k] = at.y;
      }
      write_unit<Element>(p.dx, i, dx);
      if (p.y) write_unit<Element>(p.y, i, y);
    } else {
#pragma unroll
      for (int k = 0; k < kUnit; ++k) y[k] = activated<Spec::kActivation>(x[k]);
      write_unit<Element>(p.y, i, y);
    }
  });
}

// x^n, n >= 0
__device__ __forceinline__ double power(double x, long long n) {
  double result = 1;
#pragma unroll 1
  for (; n > 0; n /= 2, x *= x)
    if (n % 2 != 0) result *= x;
  return result;
}

// Spec: Element (of the weight), kDependent. Where the sum of squares is not finite nothing is written.
template <class Spec>
__device__ __forceinline__ void adamw(const AdamWParams& p) {
  struct Step {
    float scale, step_m, scale_v, keep_less;
  };
  __shared__ Step shared;
  begin_kernel<Spec::kDependent>();
  const double sum = p.square_sum ? *p.square_sum : 0;
  if (!(fabs(sum) <= 0x1.fffffffffffffp1023)) return;
  if (threadIdx.x == 0) {
    const AdamWChanging now = p.changing ? *p.changing : p.now;
    double scale = now.scale;
    if (p.square_sum && p.clip > 0) scale *= fmin(1.0, p.clip / (sqrt(sum) * fabs(scale) + 1e-6));
    const double whole_m = 1 - power(p.beta1, now.step), whole_v = 1 - power(p.beta2, now.step);
    shared = {static_cast<float>(scale), static_cast<float>(-now.learning_rate / whole_m), static_cast<float>(1 / whole_v),
              static_cast<float>(-now.learning_rate * p.weight_decay)};
  }
  __syncthreads();
  const Step step = shared;
  const float take_m = static_cast<float>(1 - p.beta1), take_v = static_cast<float>(1 - p.beta2), epsilon = static_cast<float>(p.epsilon);
  each_unit(p.count, p.wide != 0, [&](auto unit, long long i) {
    constexpr int kUnit = decltype(unit)::kNumbers;
    float g[kUnit], master[kUnit], m[kUnit], v[kUnit];
    read_unit<float>(p.gradient, i, g);
    read_unit<float>(p.master, i, master);
    read_unit<float>(p.m, i, m);
    read_unit<float>(p.v, i, v);
#pragma unroll
    for (int k = 0; k < kUnit; ++k) {
      g[k] *= step.scale;
      m[k] = fmaf(take_m, g[k] - m[k], m[k]);
      v[k] = fmaf(take_v, g[k] * g[k] - v[k], v[k]);
      const float change = step.step_m * m[k] / (sqrtf(v[k] * step.scale_v) + epsilon);
      master[k] += fmaf(step.keep_less, master[k], change);
    }
    write_unit<float>(p.master, i, master);
    write_unit<float>(p.m, i, m);
    write_unit<float>(p.v, i, v);
    if (p.weight) write_unit<typename Spec::Element>(p.weight, i, master);
  });
}

}  // namespace fattn::ops
