// `fattn run`: attention on tensors from a file.
#pragma once

#include <CLI/CLI.hpp>

namespace fattn::cli {

// Registers the command; when it runs, it sets exit_code or throws.
void add_run(CLI::App& app, int& exit_code);

}  // namespace fattn::cli
