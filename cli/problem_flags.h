// The flags that bench and compare share: the problem, where and how to compute it, and how to sample.
#pragma once

#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/parser.h"
#include "cli/target_flags.h"
#include "measure/contestant.h"
#include "measure/problem.h"
#include "measure/sampling.h"
#include "measure/spec_options.h"

namespace fattn::cli {

class ProblemFlags {
 public:
  // `presets`: with --preset, the problem of a model; else a command may have a --preset of its own.
  void add_to(CLI::App& command, bool presets = true);
  // What holds where a flag was not given; after parsing, and no preset of these flags beside it.
  void begin_with(const measure::ProblemSpec& spec);
  void begin_with(const measure::SamplingOptions& sampling);
  // The flags of the problem alone: sizes, mask, dtype. Whether any of them was given, after parsing.
  void add_problem_to(CLI::App& command, bool presets = true);
  bool problem_given() const;

  // After parsing: the preset's values where a flag was not given. Throws CLI::ValidationError where flags contradict.
  measure::ProblemSpec spec() const;
  bool grad() const;
  std::vector<measure::Pass> passes() const;
  measure::SamplingOptions sampling() const;
  Options options() const;  // of the library; causal is the problem's
  measure::Placement place() const;
  double patience() const { return patience_; }  // seconds
  int64_t memory_limit() const { return static_cast<int64_t>(memory_limit_); }
  const std::string& json() const { return json_; }
  // The flags, every one with its value, that repeat this run whatever defaults or presets later say.
  std::vector<std::string> repeating_flags() const;
  // Those of them that say where and how, whatever the problem.
  std::vector<std::string> place_flags() const;
  // The first given flag that describes one problem or how it is sampled, which a list of problems cannot heed; empty if there is none.
  std::string first_of_one_problem() const;

  TargetFlags target;

 private:
  struct Integer {
    int64_t value = 0;
    CLI::Option* option = nullptr;
    int64_t or_else(int64_t otherwise) const;
  };
  Integer batch_, seqlen_, seqlen_k_, nheads_, nheads_k_, headdim_, headdim_v_;
  // `own` is called with the flag.
  template <class Own>
  void add_option_to(CLI::App& command, const measure::SpecOption& option, const Own& own);

  measure::ProblemSpec options_;                                                           // those of kSpecOptions as they are given, but
  std::deque<std::pair<measure::PairShape measure::ProblemSpec::*, std::string>> shapes_;  // these by their names; flags point into it
  bool causal_ = false, no_grad_ = false, warm_l2_ = false;
  CLI::Option *causal_option_ = nullptr, *dtype_option_ = nullptr, *no_grad_option_ = nullptr;
  std::optional<measure::ProblemSpec> base_;
  std::vector<const CLI::Option*> problem_options_, sampling_options_;  // without --no-grad, which a list of problems heeds
  std::string dtype_ = "fp32", preset_, json_;
  int repeats_ = 20, warmup_ = -1;
  double min_seconds_ = 0.3, max_seconds_ = 3, patience_ = 3600;
  uint64_t memory_limit_ = 0, seed_ = 1;
};

}  // namespace fattn::cli
