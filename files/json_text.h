// Records as text: a row a line, so that they are read, compared and kept as tables are.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace fattn::files {

// Two spaces of indent for members of objects; what is in an array takes a line each, whatever it holds, up to 5000 characters; longer ones are taken
// apart likewise. An array of numbers, strings, true, false and null is one line up to that length. Text that is no UTF-8 is replaced; NaN and
// infinities become null. Ends with a line break.
std::string json_text(const nlohmann::ordered_json& value);

}  // namespace fattn::files
