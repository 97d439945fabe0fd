// The kernel table of one instruction set; last include of each isa_*.cpp.
#pragma once

#include "backend/cpu/kernels.h"
#include "backend/cpu/v1_backward.h"

namespace fattn::core::FATTN_ISA {

static inline size_t forward_scratch(KernelDType dtype, const KernelShape& shape) {
  return dtype == kKernelF32   ? forward_scratch_bytes<float, OpsF32>(shape)
         : dtype == kKernelF16 ? forward_scratch_bytes<f16, OpsF32>(shape)
                               : forward_scratch_bytes<bf16, OpsF32>(shape);
}
static inline void forward(KernelDType dtype, const ForwardTask& task) {
  if (dtype == kKernelF32) return forward_task<float, OpsF32>(task);
  if (dtype == kKernelF16) return forward_task<f16, OpsF32>(task);
  return forward_task<bf16, OpsF32>(task);
}
static inline size_t decode_scratch(KernelDType, const KernelShape& shape) { return decode_scratch_bytes<OpsF32>(shape); }
static inline void decode(KernelDType dtype, const DecodeTask& task) {
  if (dtype == kKernelF32) return decode_task<float, OpsF32>(task);
  if (dtype == kKernelF16) return decode_task<f16, OpsF32>(task);
  return decode_task<bf16, OpsF32>(task);
}
static inline size_t backward_scratch(KernelDType dtype, const KernelShape& shape) {
  return dtype == kKernelF32   ? backward_scratch_bytes<float, OpsF32>(shape)
         : dtype == kKernelF16 ? backward_scratch_bytes<f16, OpsF32>(shape)
                               : backward_scratch_bytes<bf16, OpsF32>(shape);
}
static inline void backward(KernelDType dtype, const BackwardTask& task) {
  if (dtype == kKernelF32) return backward_task<float, OpsF32>(task);
  if (dtype == kKernelF16) return backward_task<f16, OpsF32>(task);
  return backward_task<bf16, OpsF32>(task);
}
static inline void row_dots(KernelDType dtype, const void* a, int64_t a_stride, const void* b, int64_t b_stride, int64_t rows, int headdim, float* to,
                            int64_t to_stride) {
  if (dtype == kKernelF32) return row_dots_of<float>(a, a_stride, b, b_stride, rows, headdim, to, to_stride);
  if (dtype == kKernelF16) return row_dots_of<f16>(a, a_stride, b, b_stride, rows, headdim, to, to_stride);
  return row_dots_of<bf16>(a, a_stride, b, b_stride, rows, headdim, to, to_stride);
}
static inline void sum_rows(KernelDType dtype, const float* parts, int64_t part_stride, int64_t nparts, int64_t headdim, void* to) {
  if (dtype == kKernelF32) return sum_rows_of<float>(parts, part_stride, nparts, headdim, to);
  if (dtype == kKernelF16) return sum_rows_of<f16>(parts, part_stride, nparts, headdim, to);
  return sum_rows_of<bf16>(parts, part_stride, nparts, headdim, to);
}

static inline void round_sums(KernelDType dtype, const uint16_t* low, int64_t headdim, void* row) {
  if (dtype == kKernelF16) return round_sums_of<f16>(low, headdim, row);
  return round_sums_of<bf16>(low, headdim, row);
}

// Of two blocks of fp32, whatever the dtype.
static inline size_t v1_forward_scratch(const KernelShape& shape) {
  return V1ForwardScratch{}.lay_out(nullptr, shape.rows, shape.block_k, shape.headdim, shape.headdim_v);
}
static inline void v1_forward(KernelDType dtype, const V1ForwardTask& task) {
  if (dtype == kKernelF32) return v1_forward_head<float>(task);
  if (dtype == kKernelF16) return v1_forward_head<f16>(task);
  return v1_forward_head<bf16>(task);
}
static inline size_t v1_backward_scratch(const KernelShape& shape) {
  return V1BackwardScratch{}.lay_out(nullptr, shape.rows, shape.block_k, shape.headdim, shape.headdim_v);
}
static inline void v1_backward(KernelDType dtype, const V1BackwardTask& task) {
  if (dtype == kKernelF32) return v1_backward_head<float>(task);
  if (dtype == kKernelF16) return v1_backward_head<f16>(task);
  return v1_backward_head<bf16>(task);
}

static constexpr CpuKernels kTable{forward_scratch, forward,    decode_scratch,     decode,     backward_scratch,    backward,   row_dots,
                                   sum_rows,        round_sums, v1_forward_scratch, v1_forward, v1_backward_scratch, v1_backward};

}  // namespace fattn::core::FATTN_ISA
