// `fattn memory`: what attention moves and where, what limits it, and what a training step keeps in memory.
#pragma once

#include "cli/parser.h"

namespace fattn::cli {

// Registers the command; when it runs, it sets exit_code or throws.
void add_memory(CLI::App& app, int& exit_code);

}  // namespace fattn::cli
