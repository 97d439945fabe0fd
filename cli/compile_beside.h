// Compiles GPU kernels in several processes: NVRTC compiles one kernel at a time in a process.
#pragma once

#include <functional>
#include <vector>

#include "fattn/problem.hpp"
#include "measure/problem.h"

namespace fattn::cli {

// Has the kernels of both passes of every problem in the cache's folder, by as many `fattn cache warm --stdin` as there are processors. What cannot
// be planned or compiled is left to whoever calls it, who is told why. Nothing happens where the folder cannot be used, and for an algorithm by name.
// `progress` is called by several threads, one at a time.
void compile_beside(const std::vector<measure::ProblemSpec>& specs, const Options& library, const std::function<void(double share)>& progress);

}  // namespace fattn::cli
