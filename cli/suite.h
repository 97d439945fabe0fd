// The suites: lists of problems that go through the same code as bench and compare, and a table of each.
#pragma once

#include <string>
#include <vector>

#include "cli/output.h"
#include "cli/provider_flags.h"
#include "cli/race.h"
#include "fattn/problem.hpp"

namespace fattn::cli {

struct SuiteOptions {
  std::string name;  // "cpu", "cuda", "prices"
  bool quick = false;
  bool grad = true;  // false: forward only
  std::string only;  // text in the titles of the parts that are wanted; empty: all
  Options library;
  measure::Placement place;
  std::string json;
  int64_t memory_limit = 0;
  double patience = 0;             // seconds: a suite that would take longer is refused before it starts
  std::vector<std::string> flags;  // for the record: those that repeat what is said above
  OutputFlags output;
  std::string status;  // a file that says what is being done; empty: none
};

// What all suites race with, but for what depends on the problem; and the flags that repeat one.
RaceOptions race_options(const SuiteOptions& suite);
std::vector<std::string> repeating_flags(const SuiteOptions& suite);

// Nothing of a suite has the text of --only in its title. Throws what the command line answers with its usage.
[[noreturn]] void throw_no_part(const std::string& only, const std::string& titles);

// Leaves the parts of a suite whose titles have the text, if there is one.
template <class Part>
void keep_parts(std::vector<Part>& parts, const std::string& only) {
  std::string titles;
  for (const Part& part : parts) titles += (titles.empty() ? "'" : ", '") + part.title + "'";
  std::erase_if(parts, [&](const Part& part) { return part.title.find(only) == std::string::npos; });
  if (parts.empty()) throw_no_part(only, titles);
}

// Speed by problem, against providers. Returns the exit code, as the one below.
int run_suite(const SuiteOptions& options, const ProviderFlags& providers);

// What every option of attention costs: its time for a visible pair over that of plain attention, in turns.
int run_prices(const SuiteOptions& suite);

}  // namespace fattn::cli
