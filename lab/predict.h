// Time and memory of attention before anything runs, from the library's plan and the constants of this machine (fattn calibrate).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lab/kernel_times.h"
#include "lab/plan_shape.h"

namespace fattn::lab {

struct Prediction {
  measure::ProblemSpec spec;
  measure::Pass pass = measure::Pass::kForward;
  std::string kernel, family, why;  // of the plan
  int64_t extra_bytes = 0, workspace_bytes = 0;
  double flops = 0;
  // Absent: `unknown` says why.
  std::optional<double> seconds;
  std::string unknown;
  std::optional<double> plain_seconds;  // where options are why: of the same problem without them
  double low = 0, high = 0;  // as far as nine of ten calls of the fitting set were off
  Work work;
  Breakdown breakdown;
  std::string binds;  // the amount that takes longest
};

class Predictor {
 public:
  Predictor(KernelTimes times, const Options& library, const measure::Placement& place)
      : times_(std::move(times)), library_(library), place_(place), sizes_(machine_sizes(place)) {}

  // Of one pass; throws what the library throws of a problem that it cannot compute.
  Prediction of(const measure::ProblemSpec& spec, measure::Pass pass) const;
  const measure::Placement& place() const { return place_; }
  const Options& library() const { return library_; }

 private:
  Prediction both(const measure::ProblemSpec& spec) const;

  KernelTimes times_;
  Options library_;
  measure::Placement place_;
  MachineSizes sizes_;
};

// What the model leaves out of a problem, in words; empty: nothing. Causal masks and windows are counted.
std::string not_modelled(const measure::ProblemSpec& spec);
measure::ProblemSpec without_what_is_not_modelled(measure::ProblemSpec spec);

}  // namespace fattn::lab
