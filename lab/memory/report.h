// All that `fattn memory` finds, as a record (docs/memory.schema.json) and as figures.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "lab/chart/chart.h"
#include "lab/memory/step.h"
#include "lab/memory/traffic.h"

namespace fattn::lab {

struct PassTraffic {
  measure::Pass pass = measure::Pass::kForward;
  double compulsory_bytes = 0;
  std::vector<Traffic> algorithms;
};

struct MemoryReport {
  measure::ProblemSpec spec;
  bool grad = true;
  MemoryMachine machine;
  std::vector<PassTraffic> passes;
  std::vector<AttentionStepMemory> steps;
};

// `planned` is called after each algorithm's plans were made, for which a GPU's kernels may have to be compiled.
MemoryReport memory_report(const measure::ProblemSpec& spec, bool grad, const std::vector<std::string>& algorithms, const MemoryMachine& machine,
                           const std::function<void()>& planned = {});

nlohmann::ordered_json to_json(const MemoryReport& report);

// Rooflines: attainable FLOP/s by FLOP a byte, one panel for each pass and level whose rate is known, with a mark for each algorithm.
std::vector<chart::Panel> rooflines(const MemoryReport& report);
// Bytes moved by each algorithm at both levels.
std::vector<chart::Panel> traffic_bars(const MemoryReport& report);
chart::Figure memory_figure(const MemoryReport& report);

}  // namespace fattn::lab
