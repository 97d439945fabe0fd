#include "lab/text.h"

#include <cstddef>

namespace fattn::lab {
namespace {

constexpr const char* kUnknown = "\xEF\xBF\xBD";  // U+FFFD

bool continues(unsigned char c) { return (c & 0xC0U) == 0x80U; }

// Bytes of the character that begins at `at`; 0 if none does: a stray byte, an overlong form, a surrogate, above U+10FFFF.
size_t length_of(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return at + i < text.size() ? static_cast<unsigned char>(text[at + i]) : static_cast<unsigned char>(0); };
  const unsigned char first = byte(0), second = byte(1);
  if (first < 0x80) return 1;
  if (first >= 0xC2 && first < 0xE0) return continues(second) ? 2 : 0;
  if (first >= 0xE0 && first < 0xF0) {
    const bool overlong = first == 0xE0 && second < 0xA0, surrogate = first == 0xED && second >= 0xA0;
    return continues(second) && continues(byte(2)) && !overlong && !surrogate ? 3 : 0;
  }
  if (first >= 0xF0 && first < 0xF5) {
    const bool overlong = first == 0xF0 && second < 0x90, beyond = first == 0xF4 && second >= 0x90;
    return continues(second) && continues(byte(2)) && continues(byte(3)) && !overlong && !beyond ? 4 : 0;
  }
  return 0;
}

}  // namespace

std::string escape_xml(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const size_t length = length_of(text, at);
    const char c = text[at];
    if (length == 0 || (length == 1 && (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) && c != '\n' && c != '\t')) {
      out += kUnknown;
    } else if (length > 1) {
      out += text.substr(at, length);
    } else if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '"') {
      out += "&quot;";
    } else if (c == '\'') {
      out += "&#39;";
    } else {
      out += c;
    }
    at += length == 0 ? 1 : length;
  }
  return out;
}

}  // namespace fattn::lab
