// Where a command's JSON goes: the flag --json FILE|-, and the stream that is left for text.
#pragma once

#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>

namespace fattn::cli {

// Writes `value` (files/json_text.h: a row a line) to the file, whole (whole_file.h), or to stdout if it is "-". NaN and infinities become null, text
// that is no UTF-8 is replaced: the record matters more than one odd byte. A plain nlohmann::json converts. Throws std::runtime_error with the
// reason.
void write_json(const nlohmann::ordered_json& value, const std::string& file_or_dash);

// Refuses a file that write_json could not write, before minutes of work are done for it. Nothing of it is touched; "" and "-" are fine.
// From here on it is written even if nobody reads stdout (streams.h).
void require_writable(const std::string& file_or_dash);

// For people: stdout, or stderr when stdout is to hold nothing but the JSON.
inline std::FILE* text_stream(const std::string& json_target) { return json_target == "-" ? stderr : stdout; }

}  // namespace fattn::cli
