// Rows of dq while tasks add to them, in fp32. A dq of 16 bits holds the high half of each sum until all are done and the workspace the low half:
// exact, and no more memory than a dq of fp32 takes, which holds the sums.
#pragma once

#include "backend/cpu/kernels.h"
#include "backend/cpu/operands.h"

namespace fattn::core::FATTN_ISA {

typedef uint16_t Halves __attribute__((vector_size(kLanes * sizeof(uint16_t))));  // of Words

// Lanes of sums from their halves, and back.
FATTN_INLINE F32 join_halves(const uint16_t* high, const uint16_t* low) {
  Halves h, l;
  __builtin_memcpy(&h, high, sizeof h);
  __builtin_memcpy(&l, low, sizeof l);
  const Words bits = __builtin_convertvector(h, Words) << 16 | __builtin_convertvector(l, Words);
  F32 x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}
FATTN_INLINE void split_halves(F32 x, uint16_t* high, uint16_t* low) {
  Words bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  const Halves h = __builtin_convertvector(bits >> 16, Halves), l = __builtin_convertvector(bits, Halves);
  __builtin_memcpy(high, &h, sizeof h);
  __builtin_memcpy(low, &l, sizeof l);
}

// The rows of a query head from some row on.
struct DqOfFloats {
  float* sums;
  int64_t stride;

  DqOfFloats(const BackwardTask& task, int64_t head, int64_t row)
      : sums(static_cast<float*>(task.dq) + head * task.dq_head_stride + row * task.dq_stride), stride(task.dq_stride) {}
  // x times scale to columns [d, d + n) of a row.
  __attribute__((always_inline)) void add(int64_t row, int64_t d, F32 x, F32 scale, int64_t n) const {
    float* at = sums + row * stride + d;
    store_n(at, fma(x, scale, load_n(at, n)), n);
  }
  NextRows next(int64_t rows, int64_t n) const { return {sums, stride, rows, n}; }
  NextRows next_low(int64_t, int64_t) const { return {}; }
};

struct DqOfHalves {
  uint16_t *high, *low;
  int64_t stride, low_stride;

  DqOfHalves(const BackwardTask& task, int64_t head, int64_t row)
      : high(static_cast<uint16_t*>(task.dq) + head * task.dq_head_stride + row * task.dq_stride),
        low(task.dq_low + head * task.dq_low_head_stride + row * task.dq_low_stride),
        stride(task.dq_stride),
        low_stride(task.dq_low_stride) {}
  __attribute__((always_inline)) void add(int64_t row, int64_t d, F32 x, F32 scale, int64_t n) const {
    uint16_t *h = high + row * stride + d, *l = low + row * low_stride + d;
    if (n >= kLanes) return split_halves(fma(x, scale, join_halves(h, l)), h, l);
    uint16_t some_high[kLanes] = {}, some_low[kLanes] = {};
    for (int64_t i = 0; i < n; ++i) {
      some_high[i] = h[i];
      some_low[i] = l[i];
    }
    split_halves(fma(x, scale, join_halves(some_high, some_low)), some_high, some_low);
    for (int64_t i = 0; i < n; ++i) {
      h[i] = some_high[i];
      l[i] = some_low[i];
    }
  }
  NextRows next(int64_t rows, int64_t n) const { return {high, stride, rows, n}; }
  NextRows next_low(int64_t rows, int64_t n) const { return {low, low_stride, rows, n}; }
};

// Calls body with the rows of dq as tensors of T, or of fp32, have them.
template <class T, class Body>
FATTN_INLINE void with_dq(const BackwardTask& task, int64_t head, int64_t row, const Body& body) {
  if (sizeof(T) == sizeof(float) || task.fp32_out)
    body(DqOfFloats(task, head, row));
  else
    body(DqOfHalves(task, head, row));
}

// The sums of a row, whose high halves are there, as T.
template <class T>
void round_sums_of(const uint16_t* low, int64_t n, void* row) {
  static_assert(sizeof(T) == sizeof(uint16_t));
  for (int64_t d = 0; d < n; d += kLanes) {
    uint16_t high_part[kLanes] = {}, low_part[kLanes] = {};
    const int64_t some = n - d < kLanes ? n - d : kLanes;
    T* at = static_cast<T*>(row) + d;
    __builtin_memcpy(high_part, at, static_cast<size_t>(some) * sizeof(T));
    __builtin_memcpy(low_part, low + d, static_cast<size_t>(some) * sizeof(T));
    store_n(at, join_halves(high_part, low_part), some);
  }
}

}  // namespace fattn::core::FATTN_ISA
