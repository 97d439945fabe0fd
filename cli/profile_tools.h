// Nsight Systems and Nsight Compute beside a profile, where they are installed: their reports and statistics in its folder.
#pragma once

#include <string>
#include <vector>

#include "lab/profile/profile.h"

namespace fattn::cli {

// Runs `command` once more under each tool. What is not here or fails is said in the tool's words, and is no error.
std::vector<lab::profile::Tool> run_nsight(const std::vector<std::string>& command, const std::string& folder);
// Why they were not run.
std::vector<lab::profile::Tool> no_nsight(const std::string& why);

// The command line of this program's own quick benchmark of a problem.
std::vector<std::string> bench_command(const std::vector<std::string>& flags);

}  // namespace fattn::cli
