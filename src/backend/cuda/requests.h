// The kernels that a problem needs, without a GPU: for `fattn cache warm` and `fattn cache pack`.
#pragma once

#include <vector>

#include "jit/jit.h"
#include "problem/problem.h"

namespace fattn::core {

// For a device of this compute capability (75, 80, 90, ...), of calls with aligned pointers. Throws Error(kUnsupported) with the reason if the CUDA
// backend cannot compute the problem there.
std::vector<jit::Request> requests_for(const Problem& problem, int arch);

}  // namespace fattn::core
