// The table of one instruction set; last include of each isa_*.cpp.
#pragma once

#include "ops/cpu/kernels.h"

namespace fattn::core::FATTN_ISA::ops {

#ifdef FATTN_DOT
typedef PairProducts Bf16Products;
constexpr bool kPairs = true;
#else
typedef Widened<bf16> Bf16Products;
constexpr bool kPairs = false;
#endif

static void panel(fattn::ops::KernelDType dtype, const fattn::ops::PanelTask& task) {
  if (dtype == fattn::ops::kKernelF32) return panel_of<float, Widened<float>>(task);
  if (dtype == fattn::ops::kKernelF16) return panel_of<f16, Widened<f16>>(task);
  return panel_of<bf16, Bf16Products>(task);
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

static constexpr fattn::ops::OpsKernels kTable{kPairs, panel, norm_row, embed_row, exp_sum_of};

}  // namespace fattn::core::FATTN_ISA::ops
