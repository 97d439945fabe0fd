// `fattn cache`: the compiled GPU kernels on disk.
#pragma once

#include "cli/parser.h"

namespace fattn::cli {

// Registers the command and its own commands; when one runs, it sets exit_code or throws.
void add_cache(CLI::App& app, int& exit_code);

}  // namespace fattn::cli
