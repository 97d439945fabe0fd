// What a training step reads: rows of tokens, each with what is to be predicted there.
#pragma once

#include <cstdint>

namespace fattn::gpt2 {

// All arrays are (sequences, seqlen), memory of the host. A token sees those of its own document alone.
struct Batch {
  int64_t sequences = 0, seqlen = 0;
  const int32_t* ids = nullptr;
  const int32_t* targets = nullptr;    // the next token; -1: no loss here
  const int32_t* positions = nullptr;  // from 0 in every document
  const int32_t* documents = nullptr;  // number of the document in its sequence, which never falls; null: each is one document
  int64_t target_count = 0;            // of targets that are not -1
};

}  // namespace fattn::gpt2
