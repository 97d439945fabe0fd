// The pieces that GPT-2's splitter makes of texts, and how often each is there.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "gpt2/data/texts.h"
#include "gpt2/tokenizer/train.h"

namespace fattn::gpt2 {

struct PieceCounts {
  std::vector<CountedPiece> pieces;  // sorted by their bytes
  uint64_t bad_lines = 0;            // lines of JSON that are no document
};

// Of documents, or of every line by itself, as Hugging Face's `train` on files has it. On all of `threads`. Throws Error.
PieceCounts count_pieces(const TextFiles& texts, bool by_line, int threads, const std::function<void(uint64_t)>& progress);

}  // namespace fattn::gpt2
