// The flags of `fattn sweep`, and what they come to: values, problem, passes, contestants.
#pragma once

#include <string>
#include <vector>

#include "cli/output.h"
#include "cli/parser.h"
#include "cli/problem_flags.h"
#include "cli/provider_flags.h"
#include "lab/sweep/axis.h"
#include "lab/sweep/presets.h"

namespace fattn::cli {

struct SweepFlags {
  ProblemFlags problem;
  ProviderFlags providers;
  OutputFlags output;
  std::string preset, over, values, fix, passes, baseline = "standard", figure, status, resume;
  std::string algorithms;
  std::vector<std::string> provider_names;
  int64_t from = 0, to = 0, step = 0, embed = 0;
  double factor = 2;

  void add_to(CLI::App& command);
  bool given(const char* name) const { return command->get_option(name)->count() > 0; }

  CLI::App* command = nullptr;
};

// All that a sweep needs to know, checked.
struct SweepSetup {
  const lab::SweepPreset* preset = nullptr;
  lab::SweepAxis axis = lab::SweepAxis::kSeqlen;
  std::vector<int64_t> values;
  measure::ProblemSpec base;
  int64_t embed = 0;
  std::string fix;  // empty where nothing is tied to what is swept
  std::vector<measure::Pass> passes;
  std::vector<std::string> contestants;
  std::string baseline;  // empty: it is none of the contestants
  std::vector<lab::Step> steps;
  std::vector<std::string> flags;  // what repeats it
  std::string resume_from;         // a file, or empty
  bool resume_must_exist = false;

  bool grad() const;
};

// Throws CLI::ValidationError or std::invalid_argument with what is wrong. Takes defaults of a preset into `flags`.
SweepSetup set_up(SweepFlags& flags);

}  // namespace fattn::cli
