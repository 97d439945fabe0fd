// What the processor says of itself, and what the operating system allows. On its own, so that a test can put another processor in its place.
#include "device/cpu_model.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fattn::core {

#if defined(__x86_64__)
namespace {

uint64_t read_xcr0() {
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));  // the intrinsic would need -mxsave
  return (static_cast<uint64_t>(high) << 32) | low;
}

}  // namespace

X86Features x86_features() {
  X86Features f;
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0, last_of_leaf7 = 0;
  if (__get_cpuid_count(1, 0, &eax, &ebx, &ecx, &edx)) f.leaf1_ecx = ecx;
  if (__get_cpuid_count(7, 0, &last_of_leaf7, &ebx, &ecx, &edx)) {
    f.leaf7_ebx = ebx;
    f.leaf7_edx = edx;
  }
  if (last_of_leaf7 >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) f.leaf7_1_eax = eax;
  constexpr uint32_t kOsxsave = 1u << 27, kAmx = 1u << 22 | 1u << 24;
  constexpr uint64_t kTileState = uint64_t{3} << 17;
  if (f.leaf1_ecx & kOsxsave) f.xcr0 = read_xcr0();
  if ((f.leaf7_edx & kAmx) == kAmx && (f.xcr0 & kTileState) == kTileState) {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA (Linux, asm/prctl.h)
    f.tile_permission = ::syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }
  return f;
}
#else
X86Features x86_features() { return {}; }
#endif

}  // namespace fattn::core
