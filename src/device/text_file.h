// Small files of /proc and /sys: the whole text, and numbers out of it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fattn::core {

// The text of the file; empty if it does not exist or cannot be read.
std::string read_text(const std::string& path);

// A decimal number that fills the text but for white space around it; nothing if it is anything else.
std::optional<int64_t> parse_int(std::string_view text);

// The pieces between separators, empty ones included.
std::vector<std::string_view> split(std::string_view text, char separator);

std::string_view trimmed(std::string_view text);

}  // namespace fattn::core
