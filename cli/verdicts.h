// Verdicts of testing/check.h for people and for records.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/table.h"
#include "testing/check.h"

namespace fattn::cli {

// "o    error 1.2e-07  allowed 3.4e-07  ok", with what is wrong after "FAILED".
std::string as_text(const testing::TensorVerdict& verdict);
// A row for each tensor; what is wrong with one is under it.
Table verdict_table(const std::string& title, const std::vector<testing::TensorVerdict>& verdicts);
nlohmann::ordered_json as_json(const std::vector<testing::TensorVerdict>& verdicts);

}  // namespace fattn::cli
