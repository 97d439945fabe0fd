#include "lab/course/blocks.h"

#include <algorithm>

namespace fattn::lab {

int64_t Blocks::count(BlockKind kind) const { return std::count(kinds.begin(), kinds.end(), kind); }

Blocks blocks_of(int64_t seqlen, int64_t block, bool causal, int64_t window) {
  Blocks blocks;
  blocks.rows = blocks.columns = (seqlen + block - 1) / block;
  for (int64_t row = 0; row < blocks.rows; ++row)
    for (int64_t column = 0; column < blocks.columns; ++column) {
      const int64_t first_query = row * block, last_query = std::min(seqlen, first_query + block) - 1;
      const int64_t first_key = column * block, last_key = std::min(seqlen, first_key + block) - 1;
      const bool none = (causal && first_key > last_query) || (window >= 0 && last_key < first_query - window);
      const bool all = (!causal || last_key <= first_query) && (window < 0 || first_key >= last_query - window);
      blocks.kinds.push_back(none ? BlockKind::kSkipped : all ? BlockKind::kWhole : BlockKind::kMasked);
    }
  return blocks;
}

}  // namespace fattn::lab
