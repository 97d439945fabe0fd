// `fattn report`: a page of records.
#pragma once

#include "cli/parser.h"

namespace fattn::cli {

// Registers the command; when it runs, it sets exit_code or throws.
void add_report(CLI::App& app, int& exit_code);

}  // namespace fattn::cli
