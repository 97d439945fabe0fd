// Inf and NaN in the AMX backward kernel (amx_backward.h): they leave the operands of products where pairs are hidden, and are added as what codes
// say (amx_nonfinite.h).
#pragma once

#include "backend/cpu/amx_backward.h"

namespace fattn::core::amx {

// Inf and NaN leave the rows at hand and the keys of a panel, unless they have.
template <bool kOptions>
__attribute__((noinline)) void Backward<kOptions>::split_operands(int64_t first, int64_t squares) {
  const auto split = [&](int64_t operand, int64_t codes, int64_t tiles, bool all_nan, bool rows_in_pairs) {
    Coded coded{0, 0};
    for (int64_t i = 0; i < tiles; ++i) {
      char *const x = tile(operand, i), *const to = tile(codes, i);
      const uint32_t rows = rows_in_pairs ? split_pairs(x, to, all_nan) : in_order(split_tile(x, to, all_nan));
      coded.rows |= rows;
      if (rows) coded.pairs |= 1u << i / 2;
    }
    return coded;
  };
  if (!finite_rows_ && !split_rows_)
    for (int64_t r = 0; r * kSide < rows_; ++r) {
      const int64_t of_q = r * 2 * at_.depth * kTileBytes, of_dout = r * 2 * at_.depth_v * kTileBytes;
      q_codes_[r] = split(at_.q_pairs + of_q, at_.q_codes + of_q, 2 * at_.depth, true, true);  // lse of such a row is no number
      dout_codes_[r] = split(at_.dout_pairs + of_dout, at_.dout_codes + of_dout, 2 * at_.depth_v, false, true);
    }
  split_rows_ = !finite_rows_;
  for (int64_t square = first; square < first + squares; ++square) {
    if (finite_keys(square) != kHasNonfinite) continue;
    const int64_t at = square * 2 * at_.depth * kTileBytes;
    key_codes(square) = split(at_.kt + at, at_.kt_codes + at, 2 * at_.depth, true, false);
    finite_keys(square) = kIsSplit;
  }
  memory_barrier();
}

// Where Inf and NaN have left, what they add to the panel's three products: of pairs that count.
template <bool kOptions>
__attribute__((noinline)) void Backward<kOptions>::add_nonfinite(int64_t first, int64_t squares, int64_t row_squares,
                                                                 const uint64_t (&computed)[kSquares]) {
  const auto has = [&](int64_t r, int64_t c) { return (computed[r] >> c & 1) != 0; };
  // Do rows of these bits see a key, or any rows keys of these bits?
  const auto rows_count = [&](int64_t c, int64_t r, uint32_t rows) {
    const __m512i* words = seen_words(c, r);
    return (_mm512_test_epi32_mask(words[0], words[0]) & rows) != 0 || (_mm512_test_epi32_mask(words[1], words[1]) & rows >> 16) != 0;
  };
  const auto keys_count = [&](int64_t c, int64_t r, uint32_t keys) {
    const __m512i *words = seen_words(c, r), bits = _mm512_set1_epi32(static_cast<int>(keys));
    return _mm512_test_epi32_mask(words[0], bits) != 0 || _mm512_test_epi32_mask(words[1], bits) != 0;
  };
  const auto add_to_keys = [&](const Coded* coded, int64_t codes, int64_t depth, int64_t acc) {
    for (int64_t c = 0; c < squares; ++c)
      for (int64_t d = 0; d < depth; ++d)
        add_codes(
            row_squares, acc + ((first + c) * 4 * depth + d * 2) * kTileBytes, 2 * depth,
            [&](int64_t r) { return has(r, c) && (coded[r].pairs >> d & 1) != 0 && rows_count(c, r, coded[r].rows); },
            [&](int64_t r) {
              tell_kinds_of_rows(c, r);
              add_products(tile(at_.kinds, 0), tile(codes, (r * depth + d) * 2), 1, 0, kTileBytes, 0, kTileBytes, 1, tile(at_.sums, 0), 2, true);
            });
  };
  if (split_rows_) {
    add_to_keys(dout_codes_, at_.dout_codes, at_.depth_v, at_.dv);
    add_to_keys(q_codes_, at_.q_codes, at_.depth, at_.dk);
  }
  for (int64_t r = 0; r < row_squares; ++r)
    for (int64_t d = 0; d < at_.depth; ++d)
      add_codes(
          squares, at_.dq + (r * 4 * at_.depth + d * 2) * kTileBytes, 2 * at_.depth,
          [&](int64_t c) {
            if (!has(r, c) || finite_keys(first + c) != kIsSplit) return false;
            const Coded& coded = key_codes(first + c);
            return (coded.pairs >> d & 1) != 0 && keys_count(c, r, coded.rows);
          },
          [&](int64_t c) {
            tell_kinds_of_keys(c, r);
            add_products(tile(at_.kt_codes, ((first + c) * at_.depth + d) * 2), tile(at_.kinds, 0), 1, 0, kTileBytes, 0, kTileBytes, 1,
                         tile(at_.sums, 0), 2, false);
          });
}

// Adds to two rows of two tiles at `acc`, which lie acc_row tiles apart, what products of codes and kinds say: `product` adds that of a square of n
// that `counts` to the sums.
template <bool kOptions>
template <class Counts, class Product>
inline void Backward<kOptions>::add_codes(int64_t n, int64_t acc, int64_t acc_row, const Counts& counts, const Product& product) {
  float *const upper = values(acc, 0), *const lower = values(acc, acc_row), *const sums = values(at_.sums, 0);
  constexpr int64_t kFloats = 2 * kTileBytes / 4;  // of two tiles
  int pending = 0;
  const auto add = [&] {
    memory_barrier();
    for (int64_t i = 0; i < kFloats; i += kLanes) {
      vec::add_decoded(sums + i, upper + i);
      vec::add_decoded(sums + kFloats + i, lower + i);
    }
    pending = 0;
    memory_barrier();
  };
  for (int64_t i = 0; i < n; ++i) {
    if (!counts(i)) continue;
    if (pending == 0) {
      if (all_nan(upper, kFloats / kLanes) && all_nan(lower, kFloats / kLanes)) return;
      clear(at_.sums, 4);
    }
    product(i);
    if (++pending == kMostCodeSquares) add();
  }
  if (pending > 0) add();
}

// The kinds of the pairs of square c of the panel and square r of the rows, as P^T lies, and as dS^T lies for dQ, where it matters only which
// count.
template <bool kOptions>
inline void Backward<kOptions>::tell_kinds_of_rows(int64_t c, int64_t r) const {
  const __m512i* words = seen_words(c, r);
  for (int key = 0; key < kSide; ++key) {
    const char* p = tile(at_.p, (c * kSquares + r) * 2 + key / 16);
    store_row(tile(at_.kinds, key / 16), key % 16, kinds_of(_mm512_load_si512(p + key % 16 * kTileRow), sees(words[0], key), sees(words[1], key)));
  }
  memory_barrier();
}

template <bool kOptions>
inline void Backward<kOptions>::tell_kinds_of_keys(int64_t c, int64_t r) const {
  const __m512i* words = seen_words(c, r);
  for (int half = 0; half < 2; ++half)
    for (int key = 0; key < 16; ++key)
      store_row(tile(at_.kinds, half), key, kinds_of(_mm512_set1_epi16(kSomeWeight), sees(words[half], key), sees(words[half], 16 + key)));
  memory_barrier();
}

}  // namespace fattn::core::amx
