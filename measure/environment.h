// Where and when a record was made.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace fattn::measure {

// Date, versions, processor, memory, operating system: the record's "environment" (docs/RECORD.md).
nlohmann::ordered_json environment();

// The date and time in records: "2026-11-28T03:57:25Z".
std::string now_utc();

}  // namespace fattn::measure
