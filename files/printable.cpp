// Decodes UTF-8 strictly (RFC 3629) and escapes everything that is not plainly visible.
#include "files/printable.h"

#include <cstdint>

namespace fattn::files {
namespace {

// The length of the valid UTF-8 sequence at the start of `s` and its code point; 0 if there is none.
size_t decode(std::string_view s, uint32_t& point) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(s[i]); };
  const uint8_t first = byte(0);
  if (first < 0x80) {
    point = first;
    return 1;
  }
  const size_t n = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || s.size() < n) return 0;
  point = first & (0x7fu >> n);
  for (size_t i = 1; i < n; ++i) {
    if ((byte(i) & 0xc0u) != 0x80u) return 0;
    point = point << 6 | (byte(i) & 0x3fu);
  }
  if (n == 3 && (point < 0x800 || (point >= 0xd800 && point <= 0xdfff))) return 0;  // overlong, surrogate
  if (n == 4 && (point < 0x10000 || point > 0x10ffff)) return 0;
  return n;
}

// Control characters (C0, DEL, C1), zero-width and direction marks, line separators, byte-order mark, tags, private use.
bool invisible(uint32_t c) {
  return c < 0x20 || (c >= 0x7f && c < 0xa0) || c == 0xad || c == 0x61c || c == 0x180e || (c >= 0x200b && c <= 0x200f) ||
         (c >= 0x2028 && c <= 0x202e) || (c >= 0x2060 && c <= 0x206f) || c == 0xfeff || (c >= 0xfff0 && c <= 0xfffb) || c >= 0xe0000;
}

std::string hex(uint32_t value, const char* prefix, int digits) {
  std::string text = prefix;
  for (int i = digits - 1; i >= 0; --i) text += "0123456789abcdef"[value >> (4 * i) & 15u];
  return text;
}

std::string escaped(uint32_t point) {
  switch (point) {
    case '\n': return "\\n";
    case '\r': return "\\r";
    case '\t': return "\\t";
    default: return point < 0x100 ? hex(point, "\\x", 2) : point < 0x10000 ? hex(point, "\\u", 4) : hex(point, "\\U", 8);
  }
}

}  // namespace

std::string printable(std::string_view text, size_t max_bytes) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    uint32_t point = 0;
    const size_t n = decode(text.substr(i), point);
    std::string piece;
    if (n == 0)
      piece = hex(static_cast<uint8_t>(text[i]), "\\x", 2);
    else if (invisible(point))
      piece = escaped(point);
    else
      piece = text.substr(i, n);
    if (out.size() + piece.size() > max_bytes) return out + "...";
    out += piece;
    i += n == 0 ? 1 : n;
  }
  return out;
}

}  // namespace fattn::files
