// The table of the kernels with products of bf16 pairs: forward, decode and backward in bf16. Everything else is AVX-512's, compiled once.
#define FATTN_ISA avx512_bf16
#define FATTN_DOT
#include "cpu/vec_avx512.h"
//
#include "backend/cpu/gemm.h"
#include "backend/cpu/rows.h"
//
#include "backend/cpu/operands.h"
#include "backend/cpu/score.h"
//
#include "backend/cpu/score_inputs.h"
//
#include "backend/cpu/documents.h"
//
#include "backend/cpu/forward.h"
//
#include "backend/cpu/backward_block.h"
#include "backend/cpu/backward_rows.h"
#include "backend/cpu/decode.h"
#include "backend/cpu/kernels.h"

namespace fattn::core {
namespace avx512_bf16 {
namespace {

size_t forward_scratch(KernelDType dtype, const KernelShape& shape) {
  return dtype == kKernelBF16 ? forward_scratch_bytes<bf16, OpsDot>(shape) : kernels_avx512()->forward_scratch(dtype, shape);
}
void forward(KernelDType dtype, const ForwardTask& task) {
  dtype == kKernelBF16 ? forward_task<bf16, OpsDot>(task) : kernels_avx512()->forward(dtype, task);
}
size_t decode_scratch(KernelDType dtype, const KernelShape& shape) {
  return dtype == kKernelBF16 ? decode_scratch_bytes<OpsDot>(shape) : kernels_avx512()->decode_scratch(dtype, shape);
}
void decode(KernelDType dtype, const DecodeTask& task) {
  dtype == kKernelBF16 ? decode_task<bf16, OpsDot>(task) : kernels_avx512()->decode(dtype, task);
}
size_t backward_scratch(KernelDType dtype, const KernelShape& shape) {
  return dtype == kKernelBF16 ? backward_scratch_bytes<bf16, OpsDot>(shape) : kernels_avx512()->backward_scratch(dtype, shape);
}
void backward(KernelDType dtype, const BackwardTask& task) {
  dtype == kKernelBF16 ? backward_task<bf16, OpsDot>(task) : kernels_avx512()->backward(dtype, task);
}

}  // namespace
}  // namespace avx512_bf16

const CpuKernels* kernels_avx512_bf16() {
  static const CpuKernels kTable = [] {
    CpuKernels table = *kernels_avx512();
    table.forward_scratch = avx512_bf16::forward_scratch;
    table.forward = avx512_bf16::forward;
    table.decode_scratch = avx512_bf16::decode_scratch;
    table.decode = avx512_bf16::decode;
    table.backward_scratch = avx512_bf16::backward_scratch;
    table.backward = avx512_bf16::backward;
    return table;
  }();
  return &kTable;
}

}  // namespace fattn::core
