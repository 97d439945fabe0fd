// `fattn profile`: where the time of attention, or of a program that uses the library, goes.
#pragma once

#include "cli/parser.h"

namespace fattn::cli {

// Registers the command; when it runs, it sets exit_code or throws.
void add_profile(CLI::App& app, int& exit_code);

}  // namespace fattn::cli
