// Bytes that are printable in Latin-1 stand for themselves; the others, in order, for U+0100 and on.
#include "gpt2/tokenizer/byte_alphabet.h"

#include "gpt2/tokenizer/utf8.h"

namespace fattn::gpt2 {
namespace {

constexpr bool stands_for_itself(uint32_t byte) {
  return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || (byte >= 0xae && byte <= 0xff);
}

constexpr uint32_t kOthers = 256 - (0x7e - 0x20) - (0xac - 0xa0) - (0xff - 0xad);

struct Alphabet {
  uint32_t letters[256];
  int bytes[256 + kOthers];  // of a letter; -1: none

  constexpr Alphabet() : letters(), bytes() {
    for (int& byte : bytes) byte = -1;
    uint32_t next = 256;
    for (uint32_t byte = 0; byte < 256; ++byte) {
      letters[byte] = stands_for_itself(byte) ? byte : next++;
      bytes[letters[byte]] = static_cast<int>(byte);
    }
  }
};
constexpr Alphabet kAlphabet;

}  // namespace

std::string letter_of_byte(uint8_t byte) {
  std::string text;
  append_code_point(kAlphabet.letters[byte], text);
  return text;
}

std::string bytes_of_token(std::string_view text) {
  std::string bytes;
  const auto* at = reinterpret_cast<const uint8_t*>(text.data());
  for (const uint8_t* end = at + text.size(); at < end;) {
    const CodePoint c = code_point_at(at);
    if (c.value >= 256 + kOthers || kAlphabet.bytes[c.value] < 0) return std::string(text);
    bytes += static_cast<char>(kAlphabet.bytes[c.value]);
    at += c.bytes;
  }
  return bytes;
}

}  // namespace fattn::gpt2
