// `fattn regress`: a record against an earlier one, a verdict a row.
#pragma once

#include "cli/parser.h"

namespace fattn::cli {

// Registers the command; when it runs, it sets exit_code or throws.
void add_regress(CLI::App& app, int& exit_code);

}  // namespace fattn::cli
