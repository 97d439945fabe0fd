#include "lab/profile/cupti_here.h"

#include "fattn/system.hpp"

namespace fattn::lab::profile {
namespace {

constexpr const char* kDriver = "CUDA driver";

}  // namespace

std::vector<std::string> toolkit_libraries() {
  std::vector<std::string> paths;
  for (const fattn_library_info& library : libraries())
    if (library.path[0] == '/' && std::string(library.name) != kDriver) paths.emplace_back(library.path);
  return paths;
}

std::string driver_library() {
  for (const fattn_library_info& library : libraries())
    if (std::string(library.name) == kDriver) return library.path;
  return "";
}

const Cupti& cupti_here() {
  static const Cupti cupti = open_cupti(cupti_candidates(toolkit_libraries()));
  return cupti;
}

}  // namespace fattn::lab::profile
