// The kernels of operations that are compiled in advance: those of a GPT-2 of each size.
#pragma once

#include <vector>

#include "ops/cuda/kernels.h"

namespace fattn::ops::cuda {

struct PlannedKernel {
  KernelKey key;
  bool quick = false;  // `make test` compiles it
};
// For devices of an architecture.
std::vector<PlannedKernel> planned_kernels(int arch);

}  // namespace fattn::ops::cuda
