// Which blocks of the matrix of scores a mask leaves to be computed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fattn::lab {

enum class BlockKind {
  kSkipped,  // no query of it sees a key of it
  kMasked,   // some do: it is computed whole, and what is hidden is thrown away
  kWhole,    // all do
};

struct Blocks {
  int64_t rows = 0, columns = 0;
  std::vector<BlockKind> kinds;  // row by row

  BlockKind at(int64_t row, int64_t column) const { return kinds[static_cast<size_t>(row * columns + column)]; }
  int64_t count(BlockKind kind) const;
  double computed_fraction() const { return 1 - static_cast<double>(count(BlockKind::kSkipped)) / static_cast<double>(kinds.size()); }
};

// Of seqlen queries and keys in blocks of `block`. A causal query sees the keys up to its own; with `window` >= 0 that many before it at most.
Blocks blocks_of(int64_t seqlen, int64_t block, bool causal, int64_t window = -1);

}  // namespace fattn::lab
