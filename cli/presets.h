// Named problems: the attention of well-known models and scenarios.
#pragma once

#include <string>
#include <vector>

#include "measure/problem.h"

namespace fattn::cli {

struct Preset {
  std::string name;
  measure::ProblemSpec spec;
  bool grad = true;  // false: an inference scenario
};

const std::vector<Preset>& presets();
const Preset* find_preset(const std::string& name);

}  // namespace fattn::cli
