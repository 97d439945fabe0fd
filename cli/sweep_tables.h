// What a sweep prints: a table and a plot for each pass, the headline beside the documents' figures, and what was found.
#pragma once

#include "cli/output.h"
#include "lab/sweep/sweep.h"

namespace fattn::cli {

void print_sweep(Output& out, const lab::Sweep& sweep);

}  // namespace fattn::cli
