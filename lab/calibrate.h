// Measures a machine: `fattn calibrate`.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "lab/calibration.h"
#include "measure/problem.h"

namespace fattn::lab {

struct CalibrateOptions {
  std::string device = "cpu";    // or "cuda:INDEX"
  int samples = 9;               // of each quantity
  double sample_seconds = 0.02;  // of one, where it repeats what it measures
  double kernel_seconds = 0;     // of timing kernels, whose constants lab/predict.h needs; 0: none are timed
  // Called before and after each quantity with the number of those done and of all, and what comes next.
  std::function<void(int done, int total, const std::string& next)> progress;
  // Has a GPU's kernels compiled, as FitOptions has it.
  std::function<void(const std::vector<measure::ProblemSpec>& specs, const std::function<void(double share)>& progress)> compile;
  // While kernels are timed: the share that is done, and what is.
  std::function<void(double share, const std::string& what)> kernel_progress;
};

// Well below a minute. Throws fattn::Error where the device cannot be used; a quantity that cannot be measured has its reason instead of a value.
Calibration calibrate(const CalibrateOptions& options);

}  // namespace fattn::lab
