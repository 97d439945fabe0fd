// A table as aligned lines.
#pragma once

#include <cstddef>
#include <string>

#include "cli/table.h"

namespace fattn::cli {

struct LineOptions {
  size_t width = 0;       // no line is longer; 0: as long as they must be
  bool in_parts = false;  // what does not fit follows in further tables with the same keys; else it is left out, and the last line says so
  bool colour = false;
};

std::string as_lines(const Table& table, const LineOptions& options);

// With the escape sequence of its colour, if there is one.
std::string painted(const std::string& text, Mood mood);

}  // namespace fattn::cli
