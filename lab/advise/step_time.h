// The time of a training step or of inference, from what this machine was measured to do, or from rates that the user states.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lab/advise/step_memory.h"
#include "lab/predict.h"

namespace fattn::lab {

struct TimeLine {
  std::string what, arithmetic;
  double seconds = 0;
};
struct StepTime {
  std::vector<TimeLine> lines;
  double seconds = 0, attention = 0;
};

// What a step is timed by.
struct StepRates {
  double flops_per_s = 0, bytes_per_s = 0;  // of products of matrices, and of memory
  std::string words;                        // where they come from
  bool bound = false;                       // they are peaks: no step is faster
  // Seconds of attention of a layer, both passes for training; null: by the rates alone, from its FLOPs and the bytes that its algorithm moves.
  std::function<double(const StepPlan&)> attention;
};

// Of a micro-batch; the optimizer's step is apart, because it comes once for all of them.
StepTime time_of(const StepPlan& plan, const StepRates& rates);
double optimizer_seconds(const StepPlan& plan, const StepRates& rates);

// The attention of a layer as a problem.
measure::ProblemSpec attention_of(const StepPlan& plan);

// From the calibration's constants; absent where it has none for products of matrices or for this attention, and `why`.
std::optional<StepRates> measured_rates(const StepPlan& plan, const KernelTimes& times, double bytes_per_s, const measure::Placement& place,
                                        std::string& why);

}  // namespace fattn::lab
