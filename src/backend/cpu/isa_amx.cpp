#include "backend/cpu/kernels.h"
namespace fattn::core {
const CpuKernels* kernels_amx() { return nullptr; }
}
