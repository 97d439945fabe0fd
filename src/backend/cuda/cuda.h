// The CUDA backend: chooses the kernels of a problem, has them compiled, and launches them.
#pragma once

#include "plan/plan.h"

namespace fattn::core {

// Fills in tiles, workspace, names. Throws Error(kUnsupported) with the reason if the kernels cannot compute the problem.
void plan_cuda_kernels(Plan& plan);

// Compiles and loads the kernels of calls with aligned pointers.
void load_cuda_kernels(const Plan& plan);

// Launches on buffers.stream. Allocates nothing and waits for nothing once the kernels are loaded.
void execute_cuda(const Plan& plan, const fattn_buffers& buffers);

}  // namespace fattn::core
