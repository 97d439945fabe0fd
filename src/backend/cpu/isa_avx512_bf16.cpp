#include "backend/cpu/kernels.h"
namespace fattn::core {
const CpuKernels* kernels_avx512_bf16() { return nullptr; }
}
