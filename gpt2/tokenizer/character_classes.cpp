// The table is spread out of the ranges that tools/make_character_classes.py wrote.
#include "gpt2/tokenizer/character_classes.h"

#include <cstddef>
#include <cstring>
#include <iterator>

namespace fattn::gpt2 {
namespace {

struct Range {
  uint32_t first;
  uint8_t value;
};

[[maybe_unused]] constexpr uint8_t L = kLetter, N = kNumber, S = kSpace, O = kOther, LW = kLetter | kWordBit, NW = kNumber | kWordBit,
                                   OW = kOther | kWordBit;

constexpr Range kRanges[] = {
#include "gpt2/tokenizer/character_ranges.inc"
};

}  // namespace

CharacterClasses::CharacterClasses() : table_(new uint8_t[kCodePoints]) {
  for (size_t i = 0; i < std::size(kRanges); ++i) {
    const uint32_t end = i + 1 < std::size(kRanges) ? kRanges[i + 1].first : kCodePoints;
    std::memset(table_.get() + kRanges[i].first, kRanges[i].value, end - kRanges[i].first);
  }
}

const CharacterClasses& CharacterClasses::instance() {
  static const CharacterClasses classes;
  return classes;
}

}  // namespace fattn::gpt2
