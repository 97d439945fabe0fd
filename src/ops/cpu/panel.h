// The product of rows with a panel of a packed weight. Outputs are in lanes and inputs are broadcast, one after the other, so the order of a sum is
// the same however many rows there are, and a weight is read from front to back: with few rows as fast as memory gives it, with many the block that
// is in the L2 cache serves 6 rows after 6.
#pragma once

#include <stdint.h>

#include "ops/cpu/kernels.h"

namespace fattn::core::FATTN_ISA::ops {

#if defined(__clang__)
#define FATTN_OPS_UNROLL _Pragma("unroll")
#define FATTN_OPS_UNROLL_4 _Pragma("unroll 4")
#else
#define FATTN_OPS_UNROLL _Pragma("GCC unroll 16")
#define FATTN_OPS_UNROLL_4 _Pragma("GCC unroll 4")
#endif

constexpr int64_t kColumns = fattn::ops::kColumns;

// Products of fp32 with weights that are widened as they are read.
template <class Weight>
struct Widened {
  typedef float X;  // what is broadcast
  typedef Weight Stored;
  static constexpr int kInputs = 1;  // of a step
  FATTN_INLINE F32 vec(const Stored* p) { return load(p); }
  FATTN_INLINE F32 broadcast(const X* p) { return set1(*p); }
  FATTN_INLINE F32 multiply_add(F32 x, F32 w, F32 acc) { return fma(x, w, acc); }
};

#ifdef FATTN_DOT
// Products of bf16 pairs, summed in fp32.
struct PairProducts {
  typedef bf16 X;
  typedef uint32_t Stored;
  static constexpr int kInputs = 2;
  FATTN_INLINE Pairs vec(const Stored* p) { return load_pairs(p); }
  FATTN_INLINE Pairs broadcast(const X* p) {
    uint32_t pair;
    __builtin_memcpy(&pair, p, sizeof pair);
    return set1_pair(pair);
  }
  FATTN_INLINE F32 multiply_add(Pairs x, Pairs w, F32 acc) { return dot(acc, x, w); }
};
#endif

// acc (rows of kColumns) += x (kRows, steps) w (steps, kColumns), kVecs vectors of columns.
template <class Ops, int kRows, int kVecs>
static __attribute__((noinline)) void multiply(const typename Ops::X* x, int64_t x_stride, const typename Ops::Stored* w, int64_t steps, float* acc,
                                               bool first) {
  F32 sums[kRows][kVecs];
  FATTN_OPS_UNROLL
  for (int r = 0; r < kRows; ++r) FATTN_OPS_UNROLL
  for (int v = 0; v < kVecs; ++v) sums[r][v] = first ? zero() : load(acc + r * kColumns + v * kLanes);
  FATTN_OPS_UNROLL_4
  for (int64_t i = 0; i < steps; ++i) {
    decltype(Ops::vec(w)) columns[kVecs];
    FATTN_OPS_UNROLL
    for (int v = 0; v < kVecs; ++v) columns[v] = Ops::vec(w + i * kColumns + v * kLanes);
    FATTN_OPS_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const auto value = Ops::broadcast(x + r * x_stride + i * Ops::kInputs);
      FATTN_OPS_UNROLL
      for (int v = 0; v < kVecs; ++v) sums[r][v] = Ops::multiply_add(value, columns[v], sums[r][v]);
    }
  }
  FATTN_OPS_UNROLL
  for (int r = 0; r < kRows; ++r) FATTN_OPS_UNROLL
  for (int v = 0; v < kVecs; ++v) store(acc + r * kColumns + v * kLanes, sums[r][v]);
}

// kRows rows against a block: one row takes all columns at once, so that there are enough sums to hide the latency; more take as many as registers
// hold.
template <class Ops, int kRows>
static void multiply_rows(const typename Ops::X* x, int64_t x_stride, const typename Ops::Stored* w, int64_t steps, float* acc, bool first) {
  constexpr int kAll = static_cast<int>(kColumns) / kLanes;
  if constexpr (kRows == 1 && kAll <= 8) {
    multiply<Ops, 1, kAll>(x, x_stride, w, steps, acc, first);
  } else {
    constexpr int kVecs = kPanelVecs;
    for (int v = 0; v < kAll; v += kVecs) multiply<Ops, kRows, kVecs>(x, x_stride, w + v * kLanes, steps, acc + v * kLanes, first);
  }
}

// To fp32.
template <class E>
static void widen_rows(const E* x, int64_t stride, int64_t rows, int64_t n, float* to, int64_t to_stride) {
  for (int64_t r = 0; r < rows; ++r) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(to + r * to_stride + i, load(x + r * stride + i));
    for (; i < n; ++i) to[r * to_stride + i] = to_float(x[r * stride + i]);
  }
}

// The sums of a task into its scratch: rows of kColumns.
template <class E, class Ops>
static void panel_sums(const fattn::ops::PanelTask& t, float* sums, float* scratch) {
  const E* x = static_cast<const E*>(t.x);
  for (int64_t begin = 0; begin < t.in; begin += fattn::ops::kBlockIn) {
    const int64_t n = t.in - begin < fattn::ops::kBlockIn ? t.in - begin : fattn::ops::kBlockIn;
    const int64_t steps = (n + Ops::kInputs - 1) / Ops::kInputs;
    const auto* w = static_cast<const typename Ops::Stored*>(t.panel) + begin / Ops::kInputs * kColumns;
    for (int64_t r = 0; r < t.rows;) {
      const int64_t rows = t.rows - r < 6 ? t.rows - r : 6;
      const typename Ops::X* from = nullptr;
      int64_t stride = t.in;
      if constexpr (sizeof(E) == sizeof(typename Ops::X)) {
        from = x + r * t.in + begin;
        if (Ops::kInputs == 2 && n % 2 != 0) {
          auto* copy = reinterpret_cast<E*>(scratch);
          stride = fattn::ops::kBlockIn;
          for (int64_t i = 0; i < rows; ++i) {
            __builtin_memcpy(copy + i * stride, from + i * t.in, static_cast<size_t>(n) * sizeof(E));
            copy[i * stride + n] = E{};
          }
          from = reinterpret_cast<const typename Ops::X*>(copy);
        }
      } else {
        stride = fattn::ops::kBlockIn;
        widen_rows(x + r * t.in + begin, t.in, rows, n, scratch, stride);
        from = scratch;
      }
      float* acc = sums + r * kColumns;
      const bool first = begin == 0;
      switch (rows) {
        case 6: multiply_rows<Ops, 6>(from, stride, w, steps, acc, first); break;
        case 5: multiply_rows<Ops, 5>(from, stride, w, steps, acc, first); break;
        case 4: multiply_rows<Ops, 4>(from, stride, w, steps, acc, first); break;
        case 3: multiply_rows<Ops, 3>(from, stride, w, steps, acc, first); break;
        case 2: multiply_rows<Ops, 2>(from, stride, w, steps, acc, first); break;
        default: multiply_rows<Ops, 1>(from, stride, w, steps, acc, first); break;
      }
      r += rows;
    }
  }
}

// What becomes of a vector of sums.
FATTN_INLINE F32 activated(fattn::ops::KernelActivation activation, F32 x) {
  if (activation == fattn::ops::kGeluByTanh) return gelu_by_tanh(x);
  if (activation == fattn::ops::kGeluByErf) return gelu_by_erf(x);
  return x;
}

template <class E, class Y>
static void finish_row(const fattn::ops::PanelTask& t, const float* sums, Y* y) {
  const E* bias = static_cast<const E*>(t.bias);
  float padded[kColumns];
  const bool whole = t.columns == kColumns;
  Y edge[kColumns];
  Y* to = y;
  if (!whole) {
    for (int64_t i = 0; i < kColumns; ++i) padded[i] = i < t.columns && bias ? to_float(bias[i]) : 0.0f;
    for (int64_t i = 0; i < kColumns; ++i) edge[i] = i < t.columns ? y[i] : Y{};
    to = edge;
  }
  for (int64_t i = 0; i < kColumns; i += kLanes) {
    F32 x = load(sums + i);
    if (bias) x = add(x, whole ? load(bias + i) : load(padded + i));
    x = activated(t.activation, x);
    if (t.accumulate) x = add(x, load(to + i));
    store(to + i, x);
  }
  if (!whole)
    for (int64_t i = 0; i < t.columns; ++i) y[i] = edge[i];
}

template <class E, class Ops>
static void panel_of(const fattn::ops::PanelTask& t) {
  auto* sums = static_cast<float*>(t.scratch);
  panel_sums<E, Ops>(t, sums, sums + fattn::ops::kMostRows * kColumns);
  for (int64_t r = 0; r < t.rows; ++r) {
    if (t.y_dtype == fattn::ops::kKernelF32)
      finish_row<E>(t, sums + r * kColumns, static_cast<float*>(t.y) + r * t.y_stride);
    else
      finish_row<E>(t, sums + r * kColumns, static_cast<E*>(t.y) + r * t.y_stride);
  }
}

}  // namespace fattn::core::FATTN_ISA::ops
