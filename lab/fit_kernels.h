// Measures what kernels take of this machine: some hundred small calls, and constants that fit them.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "lab/kernel_times.h"
#include "lab/shapes.h"

namespace fattn::lab {

struct FitOptions {
  measure::Placement place;
  double peak = 0, peak_f32 = 0;  // FLOP/s of the machine
  // What products and bytes are expected to take of the worker that has most of them: rates of a thread or a multiprocessor, and of memory; 0:
  // unknown.
  double flops_of_worker = 0, bf16_flops_of_worker = 0, f32_flops_of_worker = 0;
  double near_bytes_per_s = 0, memory_bytes_per_s = 0;
  double seconds = 30;    // of measuring; compiling a GPU's kernels, which is done once, is not counted
  uint64_t seed = 20260;  // of the fitting set; others must not be drawn from it
  // Has a GPU's kernels compiled before anything is timed; empty: each is where it is first called.
  std::function<void(const std::vector<measure::ProblemSpec>& specs, const std::function<void(double share)>& progress)> compile;
  // The share of a call's time that the machine's ceilings account for; 0: not known. Empty: the library's reach is not measured.
  std::function<double(const measure::ProblemSpec& spec, measure::Pass pass, double seconds)> accounted;
  // Called now and then with what is done, 0 to 1, and what it is.
  std::function<void(double share, const std::string& what)> progress;
};

KernelTimes fit_kernels(const FitOptions& options);

}  // namespace fattn::lab
