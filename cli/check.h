// `fattn check`: the table of cases, judged against the oracle.
#pragma once

#include "cli/parser.h"

namespace fattn::cli {

// Registers the command; when it runs, it sets exit_code or throws.
void add_check(CLI::App& app, int& exit_code);

}  // namespace fattn::cli
