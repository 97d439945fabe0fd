// What bench, compare and the suite print of their rows beside tables.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/output.h"
#include "cli/table.h"
#include "lab/ceiling.h"
#include "measure/disturbance.h"
#include "measure/record.h"

namespace fattn::cli {

std::string label_of(const measure::Row& row);        // "fattn", "torch-sdpa:flash"
std::string status_text(const measure::Row& row);     // "out_of_memory: standard: outputs and ..."
Cell interval_cell(const measure::Statistics& time);  // "12.1 ms - 12.5 ms"
// The error nearest to (or farthest beyond) its bound: "o 1.2e-07 of 4.5e-07".
std::string worst_check(const measure::Row& row);
// The fastest and the leanest of rows of one pass, as a record's summary has them.
nlohmann::ordered_json winners_json(const std::vector<measure::Row>& rows);
Cell rating_cell(const std::string& rating);  // "good": how near a time is to what this machine allows
// What that means, and where its limits come from.
void print_ceiling(const Output& out, const lab::CeilingRates& rates, const std::vector<measure::Row>& rows);
void print_peaks(const Output& out, const measure::Peaks& before, const measure::Peaks& after);
void print_warnings(const Output& out, const std::vector<measure::Row>& rows);  // each text once
// One line if something disturbed the measurement.
void print_disturbance(const Output& out, const measure::Disturbance& disturbance, const std::vector<measure::Row>& rows);
// One line, "Not here: flash-attn, xformers (for GPUs); flex-attention (no module named torch)", of rows that have Row::absent; each reason once.
std::string absent_line(const std::vector<measure::Row>& rows);

}  // namespace fattn::cli
