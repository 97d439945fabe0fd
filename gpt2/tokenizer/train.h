// Learns a byte-level BPE: tokens and merges, with ids, as Hugging Face's `BpeTrainer` gives them.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "gpt2/tokenizer/vocabulary.h"

namespace fattn::gpt2 {

// A piece of text, as GPT-2's splitter gives them, and how often it is there.
struct CountedPiece {
  std::string bytes;
  uint64_t count = 0;
};

struct BpeTraining {
  Token vocab_size = 0;                 // of all tokens; fewer where the pieces have no more pairs
  uint64_t min_frequency = 0;           // a pair that is there less often is not merged
  std::function<void()> progress = {};  // after each merge
};

struct TrainedBpe {
  std::vector<std::string> tokens;  // bytes, by id: <|endoftext|>, then the letters of all bytes in the alphabet's order, then what was merged
  std::vector<std::pair<Token, Token>> merges;  // in their order
};

// The smallest vocabulary: <|endoftext|> and all bytes.
inline constexpr Token kSmallestVocabulary = 257;

// Always the pair that is there most often, of equal ones that of the lowest ids. The order of `pieces` changes nothing.
TrainedBpe train_bpe(const std::vector<CountedPiece>& pieces, const BpeTraining& how);

// What the three files of a tokenizer hold.
std::string tokenizer_json(const TrainedBpe& bpe);
std::string vocab_json(const TrainedBpe& bpe);
std::string merges_txt(const TrainedBpe& bpe);

}  // namespace fattn::gpt2
