// Where and when a record was made.
#pragma once

#include <nlohmann/json.hpp>

namespace fattn::measure {

// Date, versions, processor, memory, operating system: the record's "environment" (docs/RECORD.md).
nlohmann::ordered_json environment();

}  // namespace fattn::measure
