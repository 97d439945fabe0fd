// `fattn watch`: a long command, the GPUs and the machine, live.
#pragma once

#include "cli/parser.h"

namespace fattn::cli {

void add_watch(CLI::App& app, int& exit_code);

}  // namespace fattn::cli
