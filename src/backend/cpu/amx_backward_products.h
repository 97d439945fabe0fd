// A panel of the AMX backward kernel (amx_backward.h): dV += P^T dO, dK += dS^T Q, dQ^T += K^T dS^T.
#pragma once

#include "backend/cpu/amx_backward.h"

namespace fattn::core::amx {

// Everything that `squares` squares of keys from `first` on give with the block of rows at hand.
template <bool kOptions>
inline void Backward<kOptions>::add_panel(int64_t first, int64_t squares) {
  const int64_t row_squares = ceil_div(rows_, kSide);
  bool finite = finite_rows_, split = split_rows_;
  for (int64_t square = first; square < first + squares; ++square) {
    finite &= finite_keys(square) == kIsFinite;
    split |= finite_keys(square) == kIsSplit;
  }
  SquareRows rows[kSquares];
  bool masked = hides_;
  for (int64_t r = 0; r < row_squares; ++r) {
    rows[r] = rows_of_square(r);
    masked |= rows[r].whole_end < (first + squares) * kSide || rows[r].whole_begin > first * kSide;
  }
  split |= masked && !finite;
  if (split) split_operands(first, squares);

  uint64_t computed[kSquares] = {};  // bit c: the rows' square with square c of the panel
  for (int64_t r = 0; r < row_squares; ++r) {
    dropout_key_ = -1;
    for (int64_t c = 0; c < squares; ++c) {
      const int64_t begin = (first + c) * kSide, end = begin + kSide;
      if (rows[r].seen_end > begin && rows[r].seen_begin < end &&
          compute_square(first + c, c, r, rows[r].whole_end >= end && rows[r].whole_begin <= begin, split)) {
        computed[r] |= uint64_t{1} << c;
      } else {
        pass_over(row_ + r * kSide, min_of(kSide, rows_ - r * kSide), begin, min_of(end, t_.key_end - t_.key_begin));
      }
    }
  }
  add_products_of_panel(first, squares, row_squares, computed);
  if (split) add_nonfinite(first, squares, row_squares, computed);
  memory_barrier();
}

// The panel's three products. Each takes the squares from its first to its last one that was computed; others between are zeros.
template <bool kOptions>
inline void Backward<kOptions>::add_products_of_panel(int64_t first, int64_t squares, int64_t row_squares, const uint64_t (&computed)[kSquares]) {
  const auto has = [&](int64_t r, int64_t c) { return (computed[r] >> c & 1) != 0; };
  struct Range {
    int64_t begin, end;
  };
  Range of_keys[BackwardLayout::kMostPanel], of_rows[kSquares];
  for (int64_t c = 0; c < squares; ++c) {
    of_keys[c] = {row_squares, 0};
    for (int64_t r = 0; r < row_squares; ++r)
      if (has(r, c)) of_keys[c] = {min_of(of_keys[c].begin, r), r + 1};
  }
  for (int64_t r = 0; r < row_squares; ++r) {
    of_rows[r] = {squares, 0};
    for (int64_t c = 0; c < squares; ++c)
      if (has(r, c)) of_rows[r] = {min_of(of_rows[r].begin, c), c + 1};
    for (int64_t c = 0; c < squares; ++c)
      if (!has(r, c) && ((of_keys[c].begin < r && r < of_keys[c].end) || (of_rows[r].begin < c && c < of_rows[r].end))) clear_square(c, r);
  }
  memory_barrier();
  for (int64_t c = 0; c < squares; ++c) {
    const auto [begin, end] = of_keys[c];
    add_products(tile(at_.p, (c * kSquares + begin) * 2), tile(at_.dout_pairs, begin * 2 * at_.depth_v), end - begin, 2, kTileBytes, 2 * at_.depth_v,
                 kTileBytes, at_.depth_v, tile(at_.dv, (first + c) * 4 * at_.depth_v), 2 * at_.depth_v, true);
    add_products(tile(at_.ds, (c * kSquares + begin) * 2), tile(at_.q_pairs, begin * 2 * at_.depth), end - begin, 2, kTileBytes, 2 * at_.depth,
                 kTileBytes, at_.depth, tile(at_.dk, (first + c) * 4 * at_.depth), 2 * at_.depth, true);
  }
  for (int64_t r = 0; r < row_squares; ++r) {
    const auto [begin, end] = of_rows[r];
    add_products(tile(at_.kt, (first + begin) * 2 * at_.depth), tile(at_.ds_keys, (begin * kSquares + r) * 2), end - begin, 2 * at_.depth, kTileBytes,
                 2 * kSquares, kTileBytes, at_.depth, tile(at_.dq, r * 4 * at_.depth), 2 * at_.depth, false);
  }
}

template <bool kOptions>
inline void Backward<kOptions>::clear_square(int64_t c, int64_t r) const {
  const int64_t offset = (c * kSquares + r) * 2 * kTileBytes;
  clear(at_.p + offset, 2);
  clear(at_.ds + offset, 2);
  clear(at_.ds_keys + offset, 2);
}

// to[32][32] = a (2 rows of `depth` tiles) times b (2 columns of `depth` tiles).
template <bool kOptions>
inline void Backward<kOptions>::multiply_square(const char* a, const char* b, int64_t depth, char* to) {
  FATTN_TILE_ZERO(0);
  FATTN_TILE_ZERO(1);
  FATTN_TILE_ZERO(2);
  FATTN_TILE_ZERO(3);
  for (int64_t d = 0; d < depth; ++d, a += kTileBytes, b += kTileBytes) {
    FATTN_TILE_LOAD(4, a, kTileRow);
    FATTN_TILE_LOAD(6, b, kTileRow);
    FATTN_TILE_DOT(0, 4, 6);
    FATTN_TILE_LOAD(7, b + depth * kTileBytes, kTileRow);
    FATTN_TILE_DOT(1, 4, 7);
    FATTN_TILE_LOAD(5, a + depth * kTileBytes, kTileRow);
    FATTN_TILE_DOT(2, 5, 6);
    FATTN_TILE_DOT(3, 5, 7);
  }
  FATTN_TILE_STORE(0, to, 2 * kTileRow);
  FATTN_TILE_STORE(1, to + kTileRow, 2 * kTileRow);
  FATTN_TILE_STORE(2, to + 2 * kTileBytes, 2 * kTileRow);
  FATTN_TILE_STORE(3, to + 2 * kTileBytes + kTileRow, 2 * kTileRow);
}

// Contracts n squares and adds to d-pairs of accumulators. Squares of a and b are a_step and b_step tiles apart.
// walk_b: a has two tiles for all d and b two a d-pair (dV, dK: [key][d]); else the other way round (dQ^T: [d][q], where
// tiles of the accumulator are ordered by q first all the same).
template <bool kOptions>
inline void Backward<kOptions>::add_products(const char* a, const char* b, int64_t n, int64_t a_step, int64_t a_pair, int64_t b_step, int64_t b_pair,
                                             int64_t d_pairs, char* acc, int64_t acc_row, bool walk_b) {
  if (n <= 0) return;
  for (int64_t d = 0; d < d_pairs; ++d) {
    char* c = acc + d * 2 * kTileBytes;
    char* c2 = c + acc_row * kTileBytes;
    // c[0], c[1]: the two d tiles of the first 16 keys or rows; c2: of the second.
    FATTN_TILE_LOAD(0, c, kTileRow);
    FATTN_TILE_LOAD(1, c + kTileBytes, kTileRow);
    FATTN_TILE_LOAD(2, c2, kTileRow);
    FATTN_TILE_LOAD(3, c2 + kTileBytes, kTileRow);
    const char* x = walk_b ? a : a + d * 2 * kTileBytes;
    const char* y = walk_b ? b + d * 2 * kTileBytes : b;
    if (walk_b) {
      for (int64_t i = 0; i < n; ++i, x += a_step * kTileBytes, y += b_step * kTileBytes) {
        FATTN_TILE_LOAD(4, x, kTileRow);
        FATTN_TILE_LOAD(6, y, kTileRow);
        FATTN_TILE_DOT(0, 4, 6);
        FATTN_TILE_LOAD(7, y + b_pair, kTileRow);
        FATTN_TILE_DOT(1, 4, 7);
        FATTN_TILE_LOAD(5, x + a_pair, kTileRow);
        FATTN_TILE_DOT(2, 5, 6);
        FATTN_TILE_DOT(3, 5, 7);
      }
    } else {
      for (int64_t i = 0; i < n; ++i, x += a_step * kTileBytes, y += b_step * kTileBytes) {
        FATTN_TILE_LOAD(4, x, kTileRow);
        FATTN_TILE_LOAD(6, y, kTileRow);
        FATTN_TILE_DOT(0, 4, 6);
        FATTN_TILE_LOAD(5, x + a_pair, kTileRow);
        FATTN_TILE_DOT(1, 5, 6);
        FATTN_TILE_LOAD(7, y + b_pair, kTileRow);
        FATTN_TILE_DOT(2, 4, 7);
        FATTN_TILE_DOT(3, 5, 7);
      }
    }
    FATTN_TILE_STORE(0, c, kTileRow);
    FATTN_TILE_STORE(1, c + kTileBytes, kTileRow);
    FATTN_TILE_STORE(2, c2, kTileRow);
    FATTN_TILE_STORE(3, c2 + kTileBytes, kTileRow);
  }
}

}  // namespace fattn::core::amx
