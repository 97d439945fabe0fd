#include "backend/cpu/kernels.h"
namespace fattn::core {
const CpuKernels* kernels_avx2() { return nullptr; }
}
