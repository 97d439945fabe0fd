// GPT-2's splitter, written out by hand:
//   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpt2/tokenizer/character_classes.h"
#include "gpt2/tokenizer/utf8.h"

namespace fattn::gpt2 {

class Splitter {
 public:
  Splitter() : table_(CharacterClasses::instance().table()) {}

  // Where the piece that begins at `at` ends. The text from `at` to `end` is valid UTF-8 and not empty.
  const uint8_t* piece_end(const uint8_t* at, const uint8_t* end) const {
    if (*at == '\'') {
      if (const size_t letters = contraction(at + 1, end)) return at + 1 + letters;
    } else if (*at == ' ' && at + 1 < end) {
      const uint8_t kind = class_at(at + 1);
      if (kind != kSpace) return run_end(kind, at + 1, end);
    }
    const uint8_t kind = class_at(at);
    return kind == kSpace ? spaces_end(at, end) : run_end(kind, at, end);
  }

 private:
  uint8_t class_at(const uint8_t* at) const {
    const uint32_t c = *at < 0x80 ? *at : code_point_at(at).value;
    return table_[c] & kClassMask;
  }

  // Letters behind an apostrophe that are a piece with it.
  static size_t contraction(const uint8_t* at, const uint8_t* end) {
    if (at == end) return 0;
    if (*at == 's' || *at == 't' || *at == 'm' || *at == 'd') return 1;
    if (end - at < 2) return 0;
    return (at[0] == 'r' && at[1] == 'e') || (at[0] == 'v' && at[1] == 'e') || (at[0] == 'l' && at[1] == 'l') ? 2 : 0;
  }

  const uint8_t* run_end(uint8_t kind, const uint8_t* at, const uint8_t* end) const {
    while (at < end) {
      if (*at < 0x80) {
        if ((table_[*at] & kClassMask) != kind) break;
        ++at;
      } else {
        const CodePoint c = code_point_at(at);
        if ((table_[c.value] & kClassMask) != kind) break;
        at += c.bytes;
      }
    }
    return at;
  }

  // White space up to the end of the text is one piece; before anything else its last character is left out, unless it is the only one.
  const uint8_t* spaces_end(const uint8_t* begin, const uint8_t* end) const {
    const uint8_t *at = begin, *last = begin;
    while (at < end) {
      const CodePoint c = code_point_at(at);
      if ((table_[c.value] & kClassMask) != kSpace) break;
      last = at;
      at += c.bytes;
    }
    return at == end || last == begin ? at : last;
  }

  const uint8_t* table_;
};

}  // namespace fattn::gpt2
