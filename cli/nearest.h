// What was probably meant.
#pragma once

#include <string>
#include <vector>

namespace fattn::cli {

// The nearest of `known` by edit distance, or "" if none is near.
std::string nearest(const std::string& given, const std::vector<std::string>& known);

}  // namespace fattn::cli
