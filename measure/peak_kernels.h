// Loops that do nothing but the arithmetic whose peak is wanted, one an instruction set.
#pragma once

#include <cstdint>

#include "fattn/types.hpp"

namespace fattn::measure {

struct PeakKernel {
  const char* name = "";
  double flops_per_iteration = 0;  // 0: there is no such loop for this processor
  void (*run)(int64_t iterations) = nullptr;
  explicit operator bool() const { return run != nullptr; }
};

// fp32 multiply-add with the registers of `isa`; for instruction sets without one, multiply and add of the base set.
PeakKernel fma_kernel(Isa isa);
// bf16 products summed in fp32: VDPBF16PS on avx512_bf16, TDPBF16PS (four accumulator tiles) on amx; none elsewhere.
PeakKernel bf16_kernel(Isa isa);

}  // namespace fattn::measure
