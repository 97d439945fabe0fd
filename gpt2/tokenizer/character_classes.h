// What each code point is to GPT-2's splitter, in the Unicode version of Hugging Face's `tokenizers`.
#pragma once

#include <cstdint>
#include <memory>

namespace fattn::gpt2 {

enum CharacterClass : uint8_t { kOther = 0, kLetter = 1, kNumber = 2, kSpace = 3 };
inline constexpr uint8_t kClassMask = 3;
inline constexpr uint8_t kWordBit = 4;  // what regular expressions call \w
inline constexpr uint32_t kCodePoints = 0x110000;

class CharacterClasses {
 public:
  // The one table, a byte a code point, made by the first call.
  static const CharacterClasses& instance();

  CharacterClass of(uint32_t code_point) const { return static_cast<CharacterClass>(table_[code_point] & kClassMask); }
  bool in_word(uint32_t code_point) const { return (table_[code_point] & kWordBit) != 0; }
  const uint8_t* table() const { return table_.get(); }

 private:
  CharacterClasses();
  std::unique_ptr<uint8_t[]> table_;
};

}  // namespace fattn::gpt2
