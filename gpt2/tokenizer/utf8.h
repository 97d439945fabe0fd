// UTF-8: what is valid, and what takes the place of what is not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace fattn::gpt2 {

bool is_utf8(std::string_view text);

// Appends `bytes`, with U+FFFD for each longest part that begins no character (as Unicode recommends, and Python and Rust do). Returns how many bytes
// were taken: all of them if they are the last, else a character that is cut at the end is left.
size_t append_repaired(std::string_view bytes, bool last, std::string& to);

// The code point at `at` of valid UTF-8, and how many bytes it takes.
struct CodePoint {
  uint32_t value;
  uint32_t bytes;
};
inline CodePoint code_point_at(const uint8_t* at) {
  const uint32_t a = at[0];
  if (a < 0x80) return {a, 1};
  if (a < 0xe0) return {(a & 0x1f) << 6 | (at[1] & 0x3fu), 2};
  if (a < 0xf0) return {(a & 0x0f) << 12 | (at[1] & 0x3fu) << 6 | (at[2] & 0x3fu), 3};
  return {(a & 0x07) << 18 | (at[1] & 0x3fu) << 12 | (at[2] & 0x3fu) << 6 | (at[3] & 0x3fu), 4};
}

void append_code_point(uint32_t code_point, std::string& to);

}  // namespace fattn::gpt2
