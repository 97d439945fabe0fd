// Where NVRTC is looked for, and what that depends on.
#pragma once

#include <string>
#include <vector>

namespace fattn::core::jit {

// What to open, best first: bare names for the loader, else absolute paths of files that are there. FATTN_NVRTC alone, if it is set.
std::vector<std::string> nvrtc_candidates();

// Everything but the files themselves that decides which of them is found, as a digest.
std::string nvrtc_search_settings();

}  // namespace fattn::core::jit
