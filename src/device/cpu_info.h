// The processor: instruction sets that can run, caches, memory, usable threads.
#pragma once

#include <cstdint>
#include <string>

#include "fattn/types.hpp"

namespace fattn::core {

struct CpuInfo {
  std::string vendor, model;
  int logical_cpus = 1;         // online
  int usable_threads = 1;       // FATTN_NUM_THREADS, else what affinity and the control group's quota allow
  uint32_t isas_available = 0;  // bit i: Isa value i; what the processor and the system can run
  Isa isa_default = Isa::kScalar;
  int64_t l1d_bytes = 0, l2_bytes = 0, l3_bytes = 0;  // of one core, one core, one package; 0: unknown

  bool available(Isa isa) const { return (isas_available >> static_cast<int>(isa)) & 1u; }
};

// Detected once; usable_threads is found anew at each call: FATTN_NUM_THREADS and affinity as they are, the quota as it
// was at most 100 ms ago. Throws Error if FATTN_NUM_THREADS has no valid value.
CpuInfo cpu_info();

// What cpu_info() says, without a copy: nothing is allocated once the processor was looked at. usable_threads of the former says nothing.
const CpuInfo& detected_cpu();
int usable_threads();

// The caller's choice, else the environment's (FATTN_CPU_ISA), else the processor's best. Throws Error(kUnsupported) for one that cannot run here.
Isa choose_isa(Isa asked, const CpuInfo& cpu);

// Physical memory and what of it is free to use now, control group included; 0 if unknown. From /proc and /sys under
// `root`, "" for the running system.
void memory_info(int64_t& total_bytes, int64_t& available_bytes, const std::string& root = "");
// Whether no process here can use so many bytes: they are more than memory and swap, or than the control group's limit. A system that promises any
// (vm.overcommit_memory 1) gives them, and kills the process that uses them. Of 1 GiB and more; below that false, without a look.
bool beyond_memory(size_t bytes, const std::string& root = "");
// Of an error for want of memory: "5 of 8 bytes are free".
std::string free_memory_text();

// Threads by the value of FATTN_NUM_THREADS; throws Error for a value that is none.
constexpr int kMaxNumThreads = 1024;
int num_threads_from(const std::string& value);

// CPUs by affinity (0: unknown) and quota: the quota rounded up, at least 1.
int usable_cpus(int by_affinity, double by_quota);

// "avx2" -> Isa::kAvx2; throws Error for a name that is none.
Isa isa_from_name(const std::string& name);

}  // namespace fattn::core
