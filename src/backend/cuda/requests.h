// The kernels that a problem needs, without a GPU: for `fattn cache warm` and `fattn cache pack`.
#pragma once

#include <vector>

#include "backend/cuda/v2_common.h"
#include "backend/cuda/v3_forward.h"
#include "jit/jit.h"
#include "problem/problem.h"

namespace fattn::core {

// For a device of this compute capability (75, 80, 90, ...). Throws Error(kUnsupported) with the reason if the CUDA backend
// cannot compute the problem there.
std::vector<jit::Request> requests_for(const Problem& problem, int arch);

namespace cuda {

// What can be asked of any device of an architecture; `level` 0: the best for it.
V2Target target_of(int arch, int level = 0);
V3Target v3_target_of(int arch);

}  // namespace cuda
}  // namespace fattn::core
