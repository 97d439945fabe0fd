// Device code that is embedded: headers of kernels/ and those of src/device_abi/, in tables.
#pragma once

#include <span>
#include <string_view>
#include <vector>

namespace fattn::core::jit {

struct Source {
  std::string_view path;  // "kernels/v2/forward.h", "device_abi/mask.h"
  std::string_view text;  // ends with a null byte that is not counted
};

using Sources = std::span<const Source>;

using SourceTable = Sources (*)();

// What attention's kernels are made of, sorted by path. Made by cmake/embed_sources.cmake. Other kernels have a table of their own.
Sources embedded_sources();
// kernels/planned.txt with the lines of the list `common` alone (planned.h reads it).
std::string_view embedded_planned();

// The headers that `text` reaches by #include "path", sorted by path. A compilation is given these and nothing else, so they
// are all that can count. Throws Error(kCompile) on an include that is not embedded, an <include>, or too many bytes.
std::vector<Source> reachable(std::string_view text, Sources sources);

inline constexpr size_t kMaxHeaderBytes = size_t{8} << 20;  // of all reachable headers; a bound, not a goal

}  // namespace fattn::core::jit
