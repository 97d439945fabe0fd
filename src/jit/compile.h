// One run of NVRTC.
#pragma once

#include <string>
#include <vector>

#include "jit/entry.h"
#include "jit/nvrtc.h"

namespace fattn::core::jit {

inline constexpr double kCompileSeconds = 180;  // after which a compilation is stopped, where NVRTC can be stopped

struct Compiled {
  std::string problem;  // empty: `entry` is whole
  Entry entry;          // its log is there in either case
};

// `headers` is what reachable() gave for the request; `key` goes into the entry.
Compiled compile(const Nvrtc& nvrtc, const Request& request, const Digest& key, const std::vector<Source>& headers, double seconds = kCompileSeconds);

}  // namespace fattn::core::jit
