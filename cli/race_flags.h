// The race that ProblemFlags describe: what bench and compare begin with.
#pragma once

#include "cli/problem_flags.h"
#include "cli/race.h"

namespace fattn::cli {

// Sizes and settings that cannot be, and inputs for which there is no memory, are refused before anything is measured.
RaceOptions race_options(const ProblemFlags& problem, const measure::ProblemSpec& spec);

// On the CPU, how fast it reads: measured once.
void measure_reads(RaceOptions& options, const measure::ProblemSpec& spec);

}  // namespace fattn::cli
