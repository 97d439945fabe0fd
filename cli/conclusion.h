// What a comparison with standard attention comes to, in words: the same answer, how much faster, how much less memory, and what to type next.
#pragma once

#include <string>
#include <vector>

#include "cli/output.h"
#include "measure/record.h"

namespace fattn::cli {

// Of the rows of all passes of one problem. Nothing where "fattn" was not compared with "standard".
void print_conclusion(const Output& out, const std::vector<measure::Row>& rows);

}  // namespace fattn::cli
