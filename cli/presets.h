// Named problems: the attention of well-known models and scenarios.
#pragma once

#include <string>
#include <vector>

#include "cli/output.h"
#include "measure/problem.h"

namespace fattn::cli {

struct Preset {
  std::string name;
  measure::ProblemSpec spec;
  bool grad = true;  // false: an inference scenario
};

const std::vector<Preset>& presets();
// By its name or by another that people use for it: gpt2, llama-3-8b.
const Preset* find_preset(const std::string& name);
// The name that was probably meant, or "".
std::string nearest_preset(const std::string& name);
// All of them with their shapes.
void print_presets(Output& out);

}  // namespace fattn::cli
