// Tells the user what was wrong with a command line, and what was probably meant.
#pragma once

#include "cli/parser.h"

namespace fattn::cli {

inline constexpr int kExitFine = 0, kExitCheckFailed = 1, kExitBadInput = 2;

// Prints help and version to stdout (0), everything else to stderr (2). Returns the exit code.
int report_parse_error(const CLI::App& app, const CLI::ParseError& error);

}  // namespace fattn::cli
