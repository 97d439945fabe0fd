// Makes text from outside (tensor and file names, environment values, messages that quote them) safe to print.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace fattn::files {

inline constexpr size_t kPrintableBytes = 2000;

// `text` with control characters and invisible direction marks escaped and bytes that are no UTF-8 written as \xNN: one line
// of valid UTF-8 that cannot move the cursor. Cut with "..." at max_bytes. What is printable already stays as it is.
std::string printable(std::string_view text, size_t max_bytes = kPrintableBytes);

}  // namespace fattn::files
