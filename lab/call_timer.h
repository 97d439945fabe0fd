// Times calls of any problem, quickly: tensors are filled from a block of random numbers, repeated, and results are not checked.
#pragma once

#include <memory>
#include <vector>

#include "measure/contestant.h"
#include "measure/convert.h"
#include "measure/statistics.h"

namespace fattn::lab {

// N(0, 1) as measure::make_inputs, but the same megabyte again and again, which takes a tenth of the time. Without what scores depend on besides.
measure::Inputs repeated_inputs(const measure::ProblemSpec& spec, bool grad);

struct TimingOptions {
  double seconds = 0.02;  // of samples of a pass at least, unless `most_samples` come first
  int fewest_samples = 3, most_samples = 40;
};

class CallTimer {
 public:
  CallTimer(const Options& library, const measure::Placement& place);
  // Throws measure::Failure where the problem cannot be computed here.
  void prepare(const measure::ProblemSpec& spec, bool grad);
  // Seconds a call; the backward pass after the forward pass, whose results it needs.
  std::vector<double> time(measure::Pass pass, const TimingOptions& options);
  // What the call allocated over its inputs: outputs, and the workspace that its plan asked for. Once more it runs; time no pass after it.
  int64_t extra_bytes(measure::Pass pass);

 private:
  std::unique_ptr<measure::Contestant> contestant_;
  measure::Inputs inputs_;
};

}  // namespace fattn::lab
