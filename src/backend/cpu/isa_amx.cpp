// The table of the AMX kernels: bf16 forward and backward on tiles, everything else as AVX-512 does it.
#include "backend/cpu/kernels.h"

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
// The headers of g++ 12 start results from `__Y = __Y`.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#if (defined(__AMX_BF16__) || defined(__AMXBF16__)) && defined(__AVX512BF16__)  // clang before 16 has the second name

// The options of scores, as the vector kernels have them.
#define FATTN_ISA amx::vec
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
#include "backend/cpu/nonfinite.h"
#include "backend/cpu/pages.h"
//
#include "backend/cpu/amx_backward_memory.h"
#include "backend/cpu/amx_backward_nonfinite.h"
#include "backend/cpu/amx_backward_products.h"
#include "backend/cpu/amx_backward_square.h"
#include "backend/cpu/amx_forward_keys.h"
#include "backend/cpu/amx_forward_softmax.h"
#include "backend/cpu/amx_forward_store.h"
#include "backend/cpu/amx_forward_weigh.h"

namespace fattn::core {
namespace amx {
namespace {

size_t forward_scratch(KernelDType dtype, const KernelShape& shape) {
  return dtype == kKernelBF16 ? forward_scratch_bytes(shape) : kernels_avx512()->forward_scratch(dtype, shape);
}
void forward(KernelDType dtype, const ForwardTask& task) { dtype == kKernelBF16 ? forward_bf16(task) : kernels_avx512()->forward(dtype, task); }

size_t backward_scratch(KernelDType dtype, const KernelShape& shape) {
  return dtype == kKernelBF16 ? backward_scratch_bytes(shape) : kernels_avx512()->backward_scratch(dtype, shape);
}
void backward(KernelDType dtype, const BackwardTask& task) { dtype == kKernelBF16 ? backward_bf16(task) : kernels_avx512()->backward(dtype, task); }

}  // namespace
}  // namespace amx

// Every processor with AMX has AVX-512. Decode has few rows, so tiles would be mostly empty; and VDPBF16PS is at half the rate of FMA on processors
// that have AMX. Algorithm v1 multiplies in fp32.
const CpuKernels* kernels_amx() {
  static const CpuKernels kTable = [] {
    CpuKernels table = *kernels_avx512();
    table.forward_scratch = amx::forward_scratch;
    table.forward = amx::forward;
    table.backward_scratch = amx::backward_scratch;
    table.backward = amx::backward;
    return table;
  }();
  return &kTable;
}

}  // namespace fattn::core

#else

namespace fattn::core {
const CpuKernels* kernels_amx() { return nullptr; }
}  // namespace fattn::core

#endif
