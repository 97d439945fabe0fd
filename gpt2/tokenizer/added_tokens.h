// Finds added tokens in text, as Hugging Face's `tokenizers` does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "gpt2/tokenizer/vocabulary.h"

namespace fattn::gpt2 {

// A part of a text: a token that was found there, or text between them (id -1).
struct Part {
  size_t begin = 0, end = 0;
  Token id = -1;
};

// Of the tokens that start first the longest, from the left to the right.
class AddedTokens {
 public:
  AddedTokens() = default;
  explicit AddedTokens(std::vector<AddedToken> tokens);

  bool empty() const { return tokens_.empty(); }
  // A token may reach over white space: text cannot be cut there and read in two.
  bool touches_space() const { return touches_space_; }
  // `text` is valid UTF-8; appends its parts. With `special_as_text` special tokens are text like any other.
  void split(std::string_view text, bool special_as_text, std::vector<Part>& parts) const;

 private:
  struct Edge {
    uint8_t byte;
    uint32_t node;
  };
  struct Node {
    std::vector<Edge> edges;
    int token = -1;  // its place in tokens_
  };
  size_t next_start(std::string_view text, size_t from) const;
  int longest_at(std::string_view text, size_t at) const;

  std::vector<AddedToken> tokens_;
  std::vector<Node> nodes_;
  bool starts_[256] = {};
  int only_start_ = -1;  // the first byte of all of them, if it is one
  bool touches_space_ = false;
};

}  // namespace fattn::gpt2
