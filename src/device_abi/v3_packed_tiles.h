// Tiles of packed sequences as algorithm v3 takes them, in the workspace. Forward their number and how many are taken, then tiles of queries:
// sequences are in groups of which one head's keys and values stay in L2; of a group the tiles with most keys come first. Backward tiles of keys,
// sequence after sequence, as many as there may be: a `row` of -1 is none. Include-free, used by the host too.
#pragma once

namespace fattn {

inline constexpr int kV3PackThreads = 1024;   // of the one CTA that writes them
inline constexpr int kV3MostTileGroups = 16;  // beyond, groups are larger

// Queries, or keys, from `row` on of a sequence, whose rows begin at q_begin and k_begin.
struct alignas(16) V3PackedTile {
  int row, batch;
  int q_begin, seqlen_q, k_begin, seqlen_k;
  int unused[2];
};

struct alignas(16) V3PackedTiles {
  int count;
  int taken;  // forward: by CTAs that were free (kernels/v3/tiles_of_cta.h)
  int unused[2];
};

// Tiles of `rows` rows that `total` rows of packed sequences may have: each sequence ends with one that is perhaps not full.
constexpr long long most_packed_tiles(long long total, long long batch, int rows) { return total / rows + batch; }
static_assert(sizeof(V3PackedTile) == 32 && sizeof(V3PackedTiles) == 16);

}  // namespace fattn
