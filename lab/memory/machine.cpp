#include "lab/memory/machine.h"

#include <algorithm>

#include "fattn/device.hpp"
#include "fattn/system.hpp"

namespace fattn::lab {

double MemoryMachine::flops_per_s(DType dtype) const {
  if (cuda) return dtype == DType::kF32 ? std::max(product_flops_per_s / 3, fma_flops_per_s) : product_flops_per_s;
  return dtype == DType::kBF16 ? std::max(product_flops_per_s, fma_flops_per_s) : fma_flops_per_s;
}

void take_rates(MemoryMachine& m, const Calibration& c) {
  m.fma_flops_per_s = c.of("fma_flops_per_s");
  m.product_flops_per_s = c.of(m.cuda ? "matrix_flops_per_s" : "bf16_flops_per_s");
  m.exp_per_s = c.of("exp_per_s");
  m.cache_bytes_per_s = c.of(m.cuda ? "l2_read_bytes_per_s" : "l3_read_bytes_per_s");
  m.dram_bytes_per_s = c.of("dram_read_bytes_per_s");
  m.start_s = m.cuda ? c.of("launch_s") : c.of("call_s") + c.of("fork_join_s");
}

MemoryMachine memory_machine(const std::string& device) {
  MemoryMachine m;
  m.device = device;
  m.cuda = device != "cpu";
  if (m.cuda) {
    const fattn_cuda_info gpu = cuda::info(device.size() > 5 ? std::stoi(device.substr(5)) : 0);
    m.name = gpu.name;
    m.workers = gpu.multiprocessors;
    m.chip_bytes = gpu.shared_per_block;
    m.cache_bytes = static_cast<double>(gpu.l2_bytes);
    m.chip = "SM", m.cache = "L2";
  } else {
    const fattn_cpu_info cpu = cpu_info();
    m.name = cpu.model;
    m.isa = static_cast<Isa>(cpu.isa_default);
    m.workers = std::max(1, cpu.usable_threads);
    m.chip_bytes = static_cast<double>(cpu.l2_bytes > 0 ? cpu.l2_bytes : int64_t{1} << 20);
    m.cache_bytes = static_cast<double>(cpu.l3_bytes);
    m.chip = "core", m.cache = "L3";
  }
  try {
    take_rates(m, stored_calibration(device));
  } catch (const CalibrationError& error) {
    m.lacks = error.what();
  }
  return m;
}

}  // namespace fattn::lab
