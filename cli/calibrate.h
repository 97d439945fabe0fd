// `fattn calibrate`: what this machine can do at most, measured once and kept for the commands that explain and predict.
#pragma once

#include <string>

#include "cli/parser.h"
#include "lab/calibration.h"

namespace fattn::cli {

// Registers the command; when it runs, it sets exit_code or throws.
void add_calibrate(CLI::App& app, int& exit_code);

// "165 GFLOP/s", "21.3 GB/s", "3.1 us": by the unit in the quantity's name.
std::string rate_text(const std::string& name, double value);

}  // namespace fattn::cli
