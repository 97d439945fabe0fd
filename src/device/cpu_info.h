// The processor: instruction sets that can run, caches, memory, usable threads.
#pragma once

#include <cstdint>
#include <string>

#include "fattn/types.hpp"

namespace fattn::core {

struct CpuInfo {
  std::string vendor, model;
  int logical_cpus = 1;
  int usable_threads = 1;       // what affinity and the control group allow
  uint32_t isas_available = 0;  // bit i: Isa value i
  Isa isa_default = Isa::kScalar;
  int64_t l1d_bytes = 0, l2_bytes = 0, l3_bytes = 0;

  bool available(Isa isa) const { return (isas_available >> static_cast<int>(isa)) & 1u; }
};

// Detected once; the thread count is read again at each call, because affinity may change.
CpuInfo cpu_info();

// Physical memory and what of it is free to use now, control group included; 0 if unknown.
void memory_info(int64_t& total_bytes, int64_t& available_bytes);

// "avx2" -> Isa::kAvx2; throws Error for a name that is none.
Isa isa_from_name(const std::string& name);

}  // namespace fattn::core
