// `fattn advise --when`: from which length on which algorithm is faster here, searched by measuring.
#pragma once

#include <string>
#include <vector>

#include "cli/output.h"
#include "measure/contestant.h"
#include "measure/problem.h"

namespace fattn::cli {

struct WhenOptions {
  measure::ProblemSpec problem;  // of which the lengths are searched
  measure::Placement place;
  int64_t longest = 2048;
  std::string json;
  std::vector<std::string> flags;  // that repeat it
};

int advise_when(const WhenOptions& options, Output& out);

}  // namespace fattn::cli
