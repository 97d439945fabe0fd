// The table of well-formed byte sequences of the Unicode standard (3.9, table 3-7).
#include "gpt2/tokenizer/utf8.h"

#include <cstring>

namespace fattn::gpt2 {
namespace {

struct Prefix {
  size_t bytes = 0;       // of the longest part of a character that is there
  bool complete = false;  // it is one
};

// What `at` begins with: a character, or as much of one as is there.
Prefix prefix_of(const uint8_t* at, const uint8_t* end) {
  const uint8_t a = *at;
  if (a < 0x80) return {1, true};
  size_t needs = 0;
  uint8_t least = 0x80, most = 0xbf;  // of the second byte
  if (a >= 0xc2 && a <= 0xdf) {
    needs = 2;
  } else if (a >= 0xe0 && a <= 0xef) {
    needs = 3;
    if (a == 0xe0) least = 0xa0;
    if (a == 0xed) most = 0x9f;
  } else if (a >= 0xf0 && a <= 0xf4) {
    needs = 4;
    if (a == 0xf0) least = 0x90;
    if (a == 0xf4) most = 0x8f;
  } else {
    return {1, false};
  }
  size_t have = 1;
  while (have < needs && at + have < end && at[have] >= least && at[have] <= most) {
    ++have;
    least = 0x80;
    most = 0xbf;
  }
  return {have, have == needs};
}

// Bytes of ASCII at the front, eight at a time.
const uint8_t* skip_ascii(const uint8_t* at, const uint8_t* end) {
  while (end - at >= 8) {
    uint64_t eight;
    std::memcpy(&eight, at, 8);
    if (eight & 0x8080808080808080u) break;
    at += 8;
  }
  while (at < end && *at < 0x80) ++at;
  return at;
}

// A character that only lacks bytes behind the end, as far as one can see.
bool is_cut(const uint8_t* at, const Prefix& prefix, const uint8_t* end) {
  return !prefix.complete && at + prefix.bytes == end && *at >= 0xc2 && *at <= 0xf4;
}

}  // namespace

bool is_utf8(std::string_view text) {
  const auto* at = reinterpret_cast<const uint8_t*>(text.data());
  const uint8_t* end = at + text.size();
  while ((at = skip_ascii(at, end)) < end) {
    const Prefix prefix = prefix_of(at, end);
    if (!prefix.complete) return false;
    at += prefix.bytes;
  }
  return true;
}

size_t append_repaired(std::string_view bytes, bool last, std::string& to) {
  const auto* begin = reinterpret_cast<const uint8_t*>(bytes.data());
  const uint8_t *end = begin + bytes.size(), *at = begin, *copied = begin;
  const auto copy = [&] { to.append(reinterpret_cast<const char*>(copied), static_cast<size_t>(at - copied)); };
  while ((at = skip_ascii(at, end)) < end) {
    const Prefix prefix = prefix_of(at, end);
    if (!prefix.complete) {
      copy();
      copied = at;
      if (!last && is_cut(at, prefix, end)) return static_cast<size_t>(at - begin);
      to += "\xef\xbf\xbd";
      copied = at + prefix.bytes;
    }
    at += prefix.bytes;
  }
  copy();
  return bytes.size();
}

void append_code_point(uint32_t c, std::string& to) {
  const auto put = [&to](uint32_t byte) { to += static_cast<char>(byte); };
  if (c < 0x80) return put(c);
  if (c < 0x800) {
    put(0xc0 | c >> 6);
  } else if (c < 0x10000) {
    put(0xe0 | c >> 12);
    put(0x80 | (c >> 6 & 0x3f));
  } else {
    put(0xf0 | c >> 18);
    put(0x80 | (c >> 12 & 0x3f));
    put(0x80 | (c >> 6 & 0x3f));
  }
  put(0x80 | (c & 0x3f));
}

}  // namespace fattn::gpt2
