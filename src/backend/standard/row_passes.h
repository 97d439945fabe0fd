// The passes of unfused attention over one row of scores: conversion, softmax, gradient of the softmax.
#pragma once

#include <cstdint>

namespace fattn::core {

// Storage of the 16-bit formats, as types of their own.
struct Half {
  uint16_t bits;
};
struct Brain {
  uint16_t bits;
};

// E is float, Half or Brain. `round` below is to E, nearest even; for float it does nothing.
template <class E>
struct RowPasses {
  void (*load)(const E* from, float* to, int64_t n);
  void (*store)(const float* from, E* to, int64_t n);
  // weights = round(softmax(row[0 .. visible))), 0 in [visible, n). Returns the log-sum-exp: -inf if nothing but -inf is
  // visible (then the weights are 0), NaN if there is a NaN. Overwrites row; with E = float, weights is row.
  float (*softmax)(float* row, E* weights, int64_t visible, int64_t n);
  // weights = round(exp(round(score) - lse)) and dscore = round(weights (round(dweight) - delta) factor) in [0, visible);
  // 0 in [visible, n) and everywhere if lse is below kLowestLse (device_abi/lowest.h). Also writes dscore over dweight, as
  // float. With E = float, weights is score and dscore is dweight.
  void (*gradient)(float* score, float* dweight, E* weights, E* dscore, int64_t visible, int64_t n, float lse, float delta, float factor);
  // to += factor line
  void (*add)(float factor, const float* line, float* to, int64_t n);
};

// For the best instruction set of this processor.
template <class E>
const RowPasses<E>& row_passes();

}  // namespace fattn::core
