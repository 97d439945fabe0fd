// The levels of a machine's memory as the traffic models see them: chip (what a core or a multiprocessor has of its own), the cache behind it that
// all share, and DRAM; and, with a calibration, their rates.
#pragma once

#include <string>

#include "fattn/types.hpp"
#include "lab/calibration.h"

namespace fattn::lab {

struct MemoryMachine {
  std::string device = "cpu", name;
  bool cuda = false;
  Isa isa = Isa::kAuto;     // of the CPU
  int workers = 1;          // threads, or multiprocessors
  double chip_bytes = 0;    // of a core's L2 cache, or the most shared memory of a block
  double cache_bytes = 0;   // of the last cache before DRAM; 0: there is none, or it is not known
  std::string chip, cache;  // "core", "L3"; "SM", "L2"

  // Rates; 0: not known, and `lacks` says why.
  double fma_flops_per_s = 0, product_flops_per_s = 0;  // products of 16 bits: bf16 alone on the CPU
  double exp_per_s = 0, cache_bytes_per_s = 0, dram_bytes_per_s = 0;
  double start_s = 0;  // of a kernel on a GPU; of a call with all threads on the CPU
  std::string lacks;

  double flops_per_s(DType dtype) const;
};

// Sizes from the library's own description of the device; rates from its calibration where one is kept. Throws fattn::Error where there is no such
// device.
MemoryMachine memory_machine(const std::string& device);
// The same of a calibration at hand; its identity is not looked at.
void take_rates(MemoryMachine& machine, const Calibration& calibration);

}  // namespace fattn::lab
