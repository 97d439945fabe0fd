// What is behind a stream: how wide it is, and whether it shows colours.
#pragma once

#include <cstddef>
#include <cstdio>

namespace fattn::cli {

// Of help, tables and text where no terminal says its own; and the least that lines are laid out for.
inline constexpr size_t kDefaultWidth = 80, kLeastWidth = 40;

bool is_terminal(std::FILE* stream);

// COLUMNS where it is set to a number, else what the terminal says, else kDefaultWidth; never less than kLeastWidth.
size_t width_of(std::FILE* stream);

// Lines of the terminal; kDefaultHeight where it does not say.
inline constexpr size_t kDefaultHeight = 24;
size_t height_of(std::FILE* stream);

// Of a terminal, unless TERM is empty or "dumb": colours, and lines that are written anew.
bool takes_escapes(std::FILE* stream);

// As takes_escapes(), unless NO_COLOR is set (no-color.org).
bool shows_colour(std::FILE* stream);

}  // namespace fattn::cli
