#include "jit/nvrtc_search.h"

#include <cstdlib>
#include <sstream>

#include "device/toolkit_search.h"
#include "jit/sha256.h"
#include "shared/env.h"

namespace fattn::core::jit {

std::vector<std::string> nvrtc_candidates() {
  const std::string wanted = env_value(kEnvNvrtc);
  if (!wanted.empty()) return {wanted};
  return toolkit_candidates("libnvrtc", {"/nvidia/cu13/lib", "/nvidia/cuda_nvrtc/lib"});
}

std::string nvrtc_search_settings() {
  std::ostringstream all;
  for (const char* variable : {"FATTN_NVRTC", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX"}) {
    const char* value = std::getenv(variable);
    all << variable << (value ? "=" : "") << (value ? value : "") << '\n';
  }
  for (const std::string& folder : package_folders()) all << folder << '\n';
  all << toolkit_majors()[0];
  return hex(sha256(all.str()));
}

}  // namespace fattn::core::jit
