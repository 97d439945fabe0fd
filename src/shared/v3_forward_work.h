// What the v3 forward kernel is told about one call besides AttentionParams and tensor maps. Passed by value; include-free.
#pragma once

namespace fattn {

struct V3ForwardWork {
  int columns, columns_v;  // headdim and headdim_v; the specialisation may be wider
  int row_tiles;           // tiles of queries of one head
  int tiles;               // of all heads
  int tiles_per_cta;       // neighbours that a CTA computes; 0: the grid takes the tiles in turns
};

}  // namespace fattn
