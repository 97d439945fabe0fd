// What the v3 forward kernel is told about one call besides AttentionParams and tensor maps. Passed by value; include-free.
#pragma once

namespace fattn {

// Division of 31-bit numbers by one that is known before, as multiplication: x / divisor = (x * factor) >> (31 + shift).
struct Divisor {
  unsigned factor, shift;
};
constexpr Divisor divisor_of(int divisor) {
  unsigned shift = 0;
  while ((1ull << shift) < static_cast<unsigned long long>(divisor)) ++shift;
  return {static_cast<unsigned>(((1ull << (31 + shift)) + static_cast<unsigned>(divisor) - 1) / static_cast<unsigned>(divisor)), shift};
}

// Of packed sequences, whose tiles whichever CTA is free takes: where its tiles are, in shared memory (kernels/v3/tiles_of_cta.h).
inline constexpr int kV3TileSlots = 4, kV3TileSlotBytes = 32;
// Where they begin behind `bytes`, and end.
constexpr int v3_slots_offset(int bytes) { return (bytes + 15) / 16 * 16; }
constexpr int v3_slots_end(int bytes, bool packed) { return packed ? v3_slots_offset(bytes) + kV3TileSlots * kV3TileSlotBytes : bytes; }

// What consumers are told of Inf and NaN in a tile's values (kernels/v3/spoilt_notes.h): notes of so many tiles, by each of two warps a word, and
// bits of keys and of columns.
inline constexpr int kV3NoteTiles = 8, kV3NoteWarps = 2, kV3NoteWords = 8;
inline constexpr int kV3NoteBytes = kV3NoteTiles * kV3NoteWarps * (1 + 2 * kV3NoteWords) * 4 + 24;

// Barriers of queries and of o: "full" and "empty" for each buffer of queries and "full" for each warpgroup's rows of o; or, with one buffer, "full"
// and "empty" for each warpgroup's queries (kernels/v3/forward_shape.h: kQueriesByGroup).
constexpr int v3_query_barriers(int groups, int query_buffers, bool skip) {
  return query_buffers == 1 && skip ? (2 * groups > 2 + groups ? 2 * groups : 2 + groups) : query_buffers * (2 + groups);
}

// Where bias and mask begin, behind everything else of `bytes`.
constexpr int v3_terms_offset(int bytes, int stages) { return stages == 0 ? bytes : (bytes + 15) / 16 * 16; }

struct V3ForwardWork {
  int columns, columns_v;  // headdim and headdim_v; the specialisation may be wider
  int row_tiles;           // tiles of queries of one head
  int tiles;               // of all heads
  int tiles_per_cta;       // neighbours that a CTA computes; 0: the grid takes the tiles in turns
  int sections;            // of AttentionParams::heads_per_section (batch, head) pairs, the last perhaps of fewer:
  int heads_of_last;
  Divisor by_section, by_heads, by_heads_of_last, by_nheads, by_group;  // by_section: its tiles; by_heads: heads_per_section
};

}  // namespace fattn
