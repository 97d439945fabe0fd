// The suite: a list of problems that goes through the same code as bench and compare, and the speed table of it.
#pragma once

#include <string>
#include <vector>

#include "cli/provider_flags.h"
#include "fattn/problem.hpp"

namespace fattn::cli {

struct SuiteOptions {
  bool quick = false;
  bool grad = true;  // false: forward only
  Options library;
  measure::Placement place;  // on a CUDA device: the cuda suite
  std::string json;
  int64_t memory_limit = 0;
  std::vector<std::string> flags;  // for the record: those that repeat what is said above
};

// Returns the exit code.
int run_suite(const SuiteOptions& options, const ProviderFlags& providers);

}  // namespace fattn::cli
