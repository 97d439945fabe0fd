// A processor with AMX in the place of this one, for programs whose AMX kernels have their tiles in memory: they need VDPBF16PS.
#include "device/cpu_model.h"

namespace fattn::core {

X86Features x86_features() {
  if (!__builtin_cpu_supports("avx512bf16")) return {};
  X86Features all;
  all.leaf1_ecx = all.leaf7_ebx = all.leaf7_edx = all.leaf7_1_eax = ~0u;
  all.xcr0 = ~uint64_t{0};
  all.tile_permission = true;
  return all;
}

}  // namespace fattn::core
