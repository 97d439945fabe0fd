// What the processor is: instruction sets that can run, name, caches. Nothing here changes while the process lives.
#pragma once

#include <cstdint>
#include <string>

#include "fattn/types.hpp"

namespace fattn::core {

constexpr uint32_t isa_bit(Isa isa) { return 1u << static_cast<int>(isa); }

// The bits of CPUID and XCR0 that decide on x86 (Intel SDM volume 2, CPUID; volume 1, chapter 13).
struct X86Features {
  uint32_t leaf1_ecx = 0;
  uint32_t leaf7_ebx = 0, leaf7_edx = 0;
  uint32_t leaf7_1_eax = 0;
  uint64_t xcr0 = 0;             // register state that the operating system saves; 0 without OSXSAVE
  bool tile_permission = false;  // the kernel lets this process use the AMX tiles
};
uint32_t isas_of(const X86Features& features);
// Of this processor; nothing on others than x86. Asks the kernel for the AMX tiles, which it grants to the whole process.
X86Features x86_features();

// The instruction set to use where nobody asks for one. AMX comes first. VDPBF16PS has twice the rate of fp32 FMA on AMD
// (Zen 4, Zen 5), but half of it on Intel (Granite Rapids: 118 against 236 GFLOP/s a core), where converting bf16 to fp32 is faster.
Isa default_isa(uint32_t isas, const std::string& vendor);

struct CpuModel {
  std::string vendor, name;
  uint32_t isas = 0;  // isa_bit of each that can run
};
CpuModel detect_cpu_model();

struct CpuCaches {
  int64_t l1d_bytes = 0, l2_bytes = 0, l3_bytes = 0;  // of one core, one core, one package; 0: unknown
};
// From /sys under `root` ("" for the running system).
CpuCaches caches_from_sysfs(const std::string& root);
// From the processor itself, for systems without /sys.
CpuCaches caches_from_cpu();

}  // namespace fattn::core
