// JSON from outside: parsed as a whole, with limits.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string_view>

namespace fattn::files {

// what() says what was found and what is allowed, in printable characters.
class JsonError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline constexpr size_t kMaxJsonDepth = 32;

// Refuses what is malformed, nested deeper than kMaxJsonDepth, has a key twice in one object, or a zero byte. Throws JsonError.
nlohmann::json parse_json(std::string_view text);

// JSON has no NaN and no Inf: null in their place.
nlohmann::ordered_json number_or_null(double x);

// What a value is, in words: "text", "an array".
const char* kind_of(const nlohmann::json& value);

}  // namespace fattn::files
