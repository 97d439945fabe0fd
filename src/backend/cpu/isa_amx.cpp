// The table of the AMX kernels: bf16 forward and backward on tiles, everything else as AVX-512 does it.
#include "backend/cpu/kernels.h"

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
// The headers of g++ 12 start results from `__Y = __Y`.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)

#include "backend/cpu/amx_forward.h"

namespace fattn::core {
namespace amx {
static void forward(KernelDType dtype, const ForwardTask& task) {
  if (dtype == kKernelBF16) return forward_bf16(task);
  kernels_avx512_bf16()->forward(dtype, task);
}
static size_t forward_scratch(KernelDType dtype, const KernelShape& shape) {
  if (dtype == kKernelBF16) return forward_scratch_bytes(shape);
  return kernels_avx512_bf16()->forward_scratch(dtype, shape);
}
}  // namespace amx

const CpuKernels* kernels_amx() {
  static const CpuKernels table = {amx::forward_scratch, amx::forward, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
  return &table;
}

}  // namespace fattn::core

#else

namespace fattn::core {
const CpuKernels* kernels_amx() { return nullptr; }
}  // namespace fattn::core

#endif
