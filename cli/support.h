// `fattn support`: what each backend computes here, asked from the library itself.
#pragma once

#include "cli/parser.h"

namespace fattn::cli {

void add_support(CLI::App& app, int& exit_code);

}  // namespace fattn::cli
