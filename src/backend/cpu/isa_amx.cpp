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

// Where the tiles have nothing to offer; every processor with AMX has these.
const CpuKernels* vectors() { return kernels_avx512_bf16(); }

size_t forward_scratch(KernelDType dtype, const KernelShape& shape) {
  return dtype == kKernelBF16 ? forward_scratch_bytes(shape) : vectors()->forward_scratch(dtype, shape);
}
void forward(KernelDType dtype, const ForwardTask& task) { dtype == kKernelBF16 ? forward_bf16(task) : vectors()->forward(dtype, task); }

size_t backward_scratch(KernelDType dtype, const KernelShape& shape) {
  return dtype == kKernelBF16 ? backward_scratch_bytes(shape) : vectors()->backward_scratch(dtype, shape);
}
void backward(KernelDType dtype, const BackwardTask& task) { dtype == kKernelBF16 ? backward_bf16(task) : vectors()->backward(dtype, task); }

// Few rows, so tiles would be mostly empty; and VDPBF16PS is at half the rate of FMA on processors that have AMX.
size_t decode_scratch(KernelDType dtype, const KernelShape& shape) { return kernels_avx512()->decode_scratch(dtype, shape); }
void decode(KernelDType dtype, const DecodeTask& task) { kernels_avx512()->decode(dtype, task); }
void row_dots(KernelDType dtype, const void* a, int64_t a_stride, const void* b, int64_t b_stride, int64_t rows, int headdim, float* to,
              int64_t to_stride) {
  vectors()->row_dots(dtype, a, a_stride, b, b_stride, rows, headdim, to, to_stride);
}
void sum_rows(KernelDType dtype, const float* parts, int64_t part_stride, int64_t nparts, int64_t headdim, void* to) {
  vectors()->sum_rows(dtype, parts, part_stride, nparts, headdim, to);
}
void round_sums(KernelDType dtype, const uint16_t* low, int64_t headdim, void* row) { vectors()->round_sums(dtype, low, headdim, row); }

// Algorithm v1 multiplies in fp32.
size_t v1_forward_scratch(const KernelShape& shape) { return vectors()->v1_forward_scratch(shape); }
void v1_forward(KernelDType dtype, const V1ForwardTask& task) { vectors()->v1_forward(dtype, task); }
size_t v1_backward_scratch(const KernelShape& shape) { return vectors()->v1_backward_scratch(shape); }
void v1_backward(KernelDType dtype, const V1BackwardTask& task) { vectors()->v1_backward(dtype, task); }

}  // namespace
}  // namespace amx

const CpuKernels* kernels_amx() {
  static constexpr CpuKernels kTable = {
      amx::forward_scratch, amx::forward,    amx::decode_scratch,     amx::decode,     amx::backward_scratch,    amx::backward,   amx::row_dots,
      amx::sum_rows,        amx::round_sums, amx::v1_forward_scratch, amx::v1_forward, amx::v1_backward_scratch, amx::v1_backward};
  return &kTable;
}

}  // namespace fattn::core

#else

namespace fattn::core {
const CpuKernels* kernels_amx() { return nullptr; }
}  // namespace fattn::core

#endif
