// Verdicts of testing/check.h for people and for records.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "testing/check.h"

namespace fattn::cli {

// "o    error 1.2e-07  allowed 3.4e-07  ok", with what is wrong after "FAILED".
std::string as_text(const testing::TensorVerdict& verdict);
nlohmann::ordered_json as_json(const std::vector<testing::TensorVerdict>& verdicts);

}  // namespace fattn::cli
