// What algorithm v1 keeps in global memory between blocks of keys: the output so far and the statistics of each row. Include-free, used by the host
// too.
#pragma once

namespace fattn {

// Rows are counted in tiles of 16, columns in tiles of 8: a 16 x 8 block is 128 floats in the order in which a warp holds it as accumulators of mma.
struct V1State {
  float* o;        // (batch, nheads, row tiles, column tiles, 128)
  float* row_max;  // (batch, nheads, 16 * row tiles), of scores without softmax_scale
  float* row_sum;  // the same, of weights
};

inline constexpr int kV1TileRows = 16;

constexpr long long v1_row_tiles(long long seqlen_q) { return (seqlen_q + kV1TileRows - 1) / kV1TileRows; }
constexpr int v1_width(int headdim_v) { return (headdim_v + 15) / 16 * 16; }  // columns of o

}  // namespace fattn
