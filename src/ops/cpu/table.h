// The table of one instruction set; last include of each isa_*.cpp.
#pragma once

#include "ops/cpu/kernels.h"

namespace fattn::core::FATTN_ISA::ops {

static void panel(fattn::ops::KernelDType dtype, const fattn::ops::PanelTask& task) {
  if (dtype == fattn::ops::kKernelF32) return panel_of<float, Widened<float>>(task);
  if (dtype == fattn::ops::kKernelF16) return panel_of<f16, Widened<f16>>(task);
  return panel_of<bf16, Widened<bf16>>(task);
}
static void norm_row(fattn::ops::KernelDType dtype, const fattn::ops::NormTask& task) {
  if (dtype == fattn::ops::kKernelF32) return norm_row_of<float>(task);
  if (dtype == fattn::ops::kKernelF16) return norm_row_of<f16>(task);
  return norm_row_of<bf16>(task);
}
static void embed_row(fattn::ops::KernelDType dtype, const void* a, const void* b, int64_t width, float* to) {
  if (dtype == fattn::ops::kKernelF32) return embed_row_of<float>(a, b, width, to);
  if (dtype == fattn::ops::kKernelF16) return embed_row_of<f16>(a, b, width, to);
  return embed_row_of<bf16>(a, b, width, to);
}

// What is done to a row, for the element that a dtype has.
#define FATTN_OPS_BY_DTYPE(dtype, call)           \
  do {                                            \
    if (dtype == fattn::ops::kKernelF32) {        \
      typedef float E;                            \
      call;                                       \
    } else if (dtype == fattn::ops::kKernelF16) { \
      typedef f16 E;                              \
      call;                                       \
    } else {                                      \
      typedef bf16 E;                             \
      call;                                       \
    }                                             \
  } while (false)

static void widen(fattn::ops::KernelDType dtype, const void* x, int64_t n, float* to) {
  FATTN_OPS_BY_DTYPE(dtype, widen_rows(static_cast<const E*>(x), 0, 1, n, to, 0));
}
static void narrow(fattn::ops::KernelDType dtype, const float* x, int64_t n, void* to) {
  FATTN_OPS_BY_DTYPE(dtype, narrow_of(x, n, static_cast<E*>(to)));
}
static void activate(fattn::ops::KernelDType dtype, fattn::ops::KernelActivation activation, const void* x, int64_t n, void* y) {
  FATTN_OPS_BY_DTYPE(dtype, activate_of(activation, static_cast<const E*>(x), n, static_cast<E*>(y)));
}
static void activation_gradient(fattn::ops::KernelDType dtype, fattn::ops::KernelActivation activation, const void* x, const void* dy, int64_t n,
                                void* dx, void* y) {
  FATTN_OPS_BY_DTYPE(
      dtype, activation_gradient_of(activation, static_cast<const E*>(x), static_cast<const E*>(dy), n, static_cast<E*>(dx), static_cast<E*>(y)));
}
static void column_sums(fattn::ops::KernelDType dtype, const void* x, int64_t stride, int64_t rows, int64_t columns, float* to) {
  FATTN_OPS_BY_DTYPE(dtype, column_sums_of(static_cast<const E*>(x), stride, rows, columns, to));
}
static void norm_gradient(fattn::ops::KernelDType dtype, const fattn::ops::NormGradientTask& task) {
  FATTN_OPS_BY_DTYPE(dtype, norm_gradient_of<E>(task));
}
static void adamw(fattn::ops::KernelDType dtype, const fattn::ops::AdamWTask& task) { FATTN_OPS_BY_DTYPE(dtype, adamw_of<E>(task)); }

static constexpr fattn::ops::OpsKernels kTable{
    false,  panel,       norm_row,      embed_row,  exp_sum_of, widen, narrow, activate, activation_gradient,
    add_to, column_sums, norm_gradient, softmax_of, adamw};

}  // namespace fattn::core::FATTN_ISA::ops
