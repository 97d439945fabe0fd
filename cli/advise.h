// `fattn advise`: how to train or run a model in a given memory, and when to use which algorithm on this machine.
#pragma once

#include "cli/parser.h"

namespace fattn::cli {

// Registers the command; when it runs, it sets exit_code or throws.
void add_advise(CLI::App& app, int& exit_code);

}  // namespace fattn::cli
