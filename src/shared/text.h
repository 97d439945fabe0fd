// Builds messages from parts: text("headdim is ", 0, "; allowed: 1 to ", 576).
#pragma once

#include <sstream>
#include <string>

namespace fattn::core {

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace fattn::core
