// An earlier record of the same sweep, whose rows that are ok need not be measured again.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace fattn::lab {

// Rows of `record` that are ok. Throws std::runtime_error with the first reason why its rows cannot stand for those of a sweep with these flags on
// the machine of this environment: another format, machine, version, or flag. Flags in `free` (with the values behind them) may differ.
std::vector<nlohmann::ordered_json> rows_to_resume(const nlohmann::ordered_json& record, const std::vector<std::string>& flags,
                                                   const nlohmann::ordered_json& environment, const std::vector<std::string>& free);

}  // namespace fattn::lab
