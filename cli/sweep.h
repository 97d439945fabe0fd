// `fattn sweep`: one size changes, and all contestants are measured at each of its values.
#pragma once

#include "cli/parser.h"

namespace fattn::cli {

void add_sweep(CLI::App& app, int& exit_code);

}  // namespace fattn::cli
