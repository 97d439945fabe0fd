// `fattn predict`: time and memory of a problem before it runs, and how good such predictions are here.
#pragma once

#include "cli/parser.h"

namespace fattn::cli {

// Registers the command; when it runs, it sets exit_code or throws.
void add_predict(CLI::App& app, int& exit_code);

}  // namespace fattn::cli
