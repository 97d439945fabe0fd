// The suites: lists of problems that go through the same code as bench and compare, and a table of each.
#pragma once

#include <string>
#include <vector>

#include "cli/provider_flags.h"
#include "cli/race.h"
#include "fattn/problem.hpp"

namespace fattn::cli {

struct SuiteOptions {
  std::string name;  // "cpu", "cuda", "prices"
  bool quick = false;
  bool grad = true;  // false: forward only
  Options library;
  measure::Placement place;
  std::string json;
  int64_t memory_limit = 0;
  std::vector<std::string> flags;  // for the record: those that repeat what is said above
};

// What all suites race with, but for what depends on the problem; and the flags that repeat one.
RaceOptions race_options(const SuiteOptions& suite);
std::vector<std::string> repeating_flags(const SuiteOptions& suite);

// Speed by problem, against providers. Returns the exit code, as the one below.
int run_suite(const SuiteOptions& options, const ProviderFlags& providers);

// What every option of attention costs: its time for a visible pair over that of plain attention, in turns.
int run_prices(const SuiteOptions& suite);

}  // namespace fattn::cli
