// A memory report in tables and words.
#pragma once

#include "cli/output.h"
#include "lab/memory/report.h"

namespace fattn::cli {

void print_report(Output& out, const lab::MemoryReport& report);
// The line of arithmetic behind every number, and the models in words with their sources.
void print_arithmetic(const Output& out, const lab::MemoryReport& report);
// Rooflines of characters, `width` columns wide.
void print_rooflines(const Output& out, const lab::MemoryReport& report, size_t width, bool colour);

}  // namespace fattn::cli
