// `fattn compare`: the library, the standard algorithm and providers on one problem.
#pragma once

#include "cli/parser.h"

namespace fattn::cli {

// Registers the command; when it runs, it sets exit_code or throws.
void add_compare(CLI::App& app, int& exit_code);

}  // namespace fattn::cli
