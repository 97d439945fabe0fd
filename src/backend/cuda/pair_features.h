// Features of pairs and of batch entries: which a problem has, and as a number in a kernel's key, in its source and in shared memory.
#pragma once

#include <cstdint>
#include <string>

#include "device_abi/attention_params.h"
#include "device_abi/term_tile.h"
#include "problem/problem.h"

namespace fattn::core::cuda {

// ", dropout" and so on, of the features in a key.
std::string names_of_pair(int32_t bits);

PairFeatures pair_features(const Problem& problem);
// A number for a kernel's key, and back. dlse is of the key that prepares a backward pass alone.
int32_t pair_bits(const PairFeatures& pair);
PairFeatures pair_features_of(int32_t bits);
// The line of a specialisation that says them; none if there are none.
std::string pair_line(int32_t bits);
// Whether scores or weights have a part for every pair, which takes registers.
inline bool heavy(const PairFeatures& pair) { return pair.terms() || pair.dropout || pair.dbias; }

// Whether there is something that can come through shared memory: bias or a mask of pairs.
inline bool can_stage(const PairFeatures& pair) { return pair.bias != 0 || pair.mask; }
// What a tile of them takes there.
constexpr TermTile term_tile(const PairFeatures& pair, int rows, int keys, bool transposed) {
  return {rows, keys, pair.bias == 0 ? 0 : pair.bias == 2 ? 4 : 2, pair.mask, transposed};
}

}  // namespace fattn::core::cuda
