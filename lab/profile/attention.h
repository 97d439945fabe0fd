// Calls of the library that are recorded: plans and memory are made as a user's program would make them, each allocation by its name.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lab/profile/counters.h"
#include "lab/profile/cupti.h"
#include "lab/profile/profile.h"
#include "lab/profile/trace_file.h"
#include "measure/contestant.h"
#include "measure/convert.h"

namespace fattn::lab::profile {

inline constexpr int64_t kMostEventsOfASide = 1'000'000;

struct AttentionRun {
  measure::ProblemSpec spec;
  Options options;  // with the algorithm of the side
  measure::Placement place;
  std::string side;  // "standard", "fattn"
  int calls = 3;     // that are recorded
  int64_t memory_limit = 0;
  PerfCounters* perf = nullptr;  // of the CPU
  const Cupti* cupti = nullptr;  // of a GPU
};

// Of one side and its passes: operations, counters, memory; its events are a lane. What fails is the reason of its passes.
// `done` after each step, of which there are steps_of(passes).
// `notes` gets why a GPU's side is not whole.
Side profile_attention(const AttentionRun& run, const measure::Inputs& inputs, const std::vector<measure::Pass>& passes, Lane& lane,
                       std::vector<std::string>& notes, const std::function<void()>& done);
inline int steps_of(const std::vector<measure::Pass>& passes) { return 2 * static_cast<int>(passes.size()); }

}  // namespace fattn::lab::profile
