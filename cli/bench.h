// `fattn bench`: time, rate, share of the peak and memory of one problem, or of the suite.
#pragma once

#include "cli/parser.h"

namespace fattn::cli {

// Registers the command; when it runs, it sets exit_code or throws.
void add_bench(CLI::App& app, int& exit_code);

}  // namespace fattn::cli
