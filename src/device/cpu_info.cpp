#include "device/cpu_info.h"

#include <algorithm>
#include <thread>

#include "shared/text.h"

namespace fattn::core {

CpuInfo cpu_info() {
  CpuInfo info;
  info.usable_threads = info.logical_cpus = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  info.isas_available = 1u << static_cast<int>(Isa::kScalar);
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) info.isas_available |= 1u << static_cast<int>(Isa::kAvx2), info.isa_default = Isa::kAvx2;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    info.isas_available |= 1u << static_cast<int>(Isa::kAvx512), info.isa_default = Isa::kAvx512;
#endif
  return info;
}

void memory_info(int64_t& total_bytes, int64_t& available_bytes) { total_bytes = available_bytes = 0; }

Isa isa_from_name(const std::string& name) {
  for (Isa isa : {Isa::kAuto, Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmx, Isa::kNeon})
    if (name == name_of(isa)) return isa;
  throw Error(ErrorCode::kInvalidArgument, text("'", name, "' is no instruction set; allowed: scalar, avx2, avx512, avx512_bf16, amx, neon"));
}

}  // namespace fattn::core
