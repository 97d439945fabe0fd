// A program that is profiled: started with what records inside of it, counted and looked at from outside, its exit code kept.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "lab/profile/profile.h"

namespace fattn::cli {

// The traces that a program's processes left in a folder. Throws std::runtime_error where there is none and `needed`.
void take_traces(lab::profile::Profile& profile, const std::string& folder, bool needed);

// Runs it to its end. Ctrl-C reaches the program too, and what there is until then is in the profile. Throws std::runtime_error if it cannot be
// started.
lab::profile::Profile profile_program(const std::vector<std::string>& command);

// What a shell would say of how it ended.
int exit_code_of(const lab::profile::ProgramRun& run);

}  // namespace fattn::cli
