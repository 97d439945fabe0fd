// Tables for programs and documents: all columns, every cell with all of its digits.
#pragma once

#include <string>

#include "cli/table.h"

namespace fattn::cli {

// GitHub's tables; cells as people see them, '|' escaped. What is under rows is a last column, "note".
std::string as_markdown(const Table& table);

// RFC 4180: lines end with CR LF. The table's title, if it has one, is the first column, "table"; units are in the headings. The headings alone, and
// the rows alone, so that tables of the same columns are one.
std::string csv_headings(const Table& table);
std::string csv_rows(const Table& table);

}  // namespace fattn::cli
