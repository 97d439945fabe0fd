// The CUPTI of this machine, found beside the libraries of a toolkit that the library opened.
#pragma once

#include <string>
#include <vector>

#include "lab/profile/cupti.h"

namespace fattn::lab::profile {

// Paths of those libraries.
std::vector<std::string> toolkit_libraries();
// Of libcuda; empty where there is none.
std::string driver_library();
// Opened at the first call, for the life of the process.
const Cupti& cupti_here();

}  // namespace fattn::lab::profile
