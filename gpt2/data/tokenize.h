// Texts to token files, on all cores; what comes out does not depend on how many there are.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "gpt2/data/texts.h"
#include "gpt2/tokenizer/tokenizer.h"

namespace fattn::gpt2 {

struct TokenizeOptions {
  uint64_t shard_tokens = 100'000'000;
  double validation = 0;  // share of the text that goes into files of its own, 0 to 0.5
  uint64_t seed = 0;      // of which part of it that is
  int threads = 1;
  std::function<void(uint64_t)> progress = {};            // bytes of text that are done; from one thread at a time
  std::function<void(const std::string&)> bad_line = {};  // "FILE:LINE: why", in their order; from one thread at a time
};

struct TokenizedSet {
  uint64_t tokens = 0, documents = 0, targets = 0, text_bytes = 0, file_bytes = 0;
  uint32_t files = 0;
};

struct Tokenized {
  TokenizedSet train, validation;
  uint64_t bad_lines = 0;
};

// Writes OUT/train, and OUT/validation where a share is asked for. Every document ends with <|endoftext|>. Lines that are no document are left out
// and told. Documents are drawn for validation one of every 1 / share, long ones part by part (of 1 to 64 KiB). Throws Error, std::runtime_error.
Tokenized tokenize(const Tokenizer& tokenizer, const TextFiles& texts, const std::string& out, const TokenizeOptions& options);

}  // namespace fattn::gpt2
