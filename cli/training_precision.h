// What `fattn gpt2 train --track-precision` has found, in words and as JSON.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "cli/output.h"
#include "gpt2/train/tracker.h"

namespace fattn::cli {

void say_precision(const Output& out, const gpt2::PrecisionTracker& tracker, const std::string& file);
nlohmann::ordered_json precision_json(const gpt2::PrecisionTracker& tracker);

}  // namespace fattn::cli
