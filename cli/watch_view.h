// A reading of `fattn watch` as people and programs read it.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/output.h"
#include "cli/watch_reading.h"

namespace fattn::cli {

// Lines of at most `width` columns, each ended.
std::string watch_screen(const WatchReading& reading, const Output& out, size_t width);
// All of it in one line without an end.
std::string watch_line(const WatchReading& reading);
// What is said when it has ended.
std::string watch_end(const WatchReading& reading);
// docs/watch.schema.json
nlohmann::ordered_json watch_json(const WatchReading& reading);

}  // namespace fattn::cli
