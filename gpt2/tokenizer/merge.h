// Merges the bytes of one piece of text into tokens: always the pair of the lowest rank, of equal ones the first.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "gpt2/tokenizer/vocabulary.h"

namespace fattn::gpt2 {

// Scratch for long pieces, kept from call to call.
class Merger {
 public:
  explicit Merger(const Vocabulary& vocabulary) : vocabulary_(vocabulary) {}

  // Appends the tokens of a piece that is not empty. O(n log n) in its length.
  void merge(std::string_view piece, std::vector<Token>& to);

 private:
  void merge_short(std::string_view piece, std::vector<Token>& to) const;
  void merge_long(std::string_view piece, std::vector<Token>& to);

  struct Symbol {
    Token id;  // -1: merged into the one before
    uint32_t before, after;
  };
  const Vocabulary& vocabulary_;
  std::vector<Symbol> symbols_;
  std::vector<uint64_t> heap_;  // rank << 32 | place of the left symbol
};

}  // namespace fattn::gpt2
