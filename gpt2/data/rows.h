// Rows of a stream of tokens: what a model reads at each place, and what it is to foretell there.
#pragma once

#include <cstdint>

#include "gpt2/data/token_set.h"

namespace fattn::gpt2 {

// Where a row goes, `seqlen` numbers each.
struct Row {
  int32_t *ids, *targets, *positions, *documents;
};

class Rows {
 public:
  Rows(TokenSet& set, int64_t seqlen) : set_(set), seqlen_(static_cast<uint64_t>(seqlen)) {}

  // The last one may be filled up by padding.
  uint64_t count() const { return (set_.tokens() + seqlen_ - 1) / seqlen_; }
  // Row i has the tokens from i * seqlen on. The target of a token is the next one of its document, also where that begins the next row. Returns how
  // many targets there are.
  int64_t fill(uint64_t i, const Row& to) const;
  // A row of padding, which has no targets.
  void pad(const Row& to) const { pad(to, 0, 0); }

 private:
  void pad(const Row& to, uint64_t from, int32_t document) const;

  TokenSet& set_;
  uint64_t seqlen_;
};

}  // namespace fattn::gpt2
