// Text laid out in columns of a terminal: its width there, and its lines.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace fattn::cli {

// Columns that UTF-8 takes: 2 for Chinese, Japanese and Korean characters, 0 for marks that combine with the one before.
size_t display_width(std::string_view text);

// Lines of at most `width` columns, broken at spaces and beside Chinese, Japanese and Korean characters, but not before their closing punctuation.
// Only a word that is wider than a line is broken inside, behind a '/' or ',' if it has one.
std::vector<std::string> wrapped(std::string_view text, size_t width);
std::vector<std::string> wrapped(std::string_view text, size_t first_width, size_t other_width);
// With spaces at which no line ends; `wrapped` makes spaces of them again.
std::string unbroken(std::string text);

// The same for a text of several lines, each with its own leading spaces kept; what a line continues on has `hanging` more. A newline ends each.
std::string laid_out(std::string_view text, size_t width, size_t hanging = 0);

// "a", "a or b", "a, b or c".
std::string any_of(const std::vector<std::string>& names, const char* word = "or");

}  // namespace fattn::cli
