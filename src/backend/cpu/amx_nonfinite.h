// Products of tiles with an operand that holds Inf or NaN beside weights of 0, as the vector kernels have them (nonfinite.h): the operand without
// these, and a second product, of codes and of what kind a pair is, whose sums say what they add. Codes and kinds are exact in bf16.
#pragma once

#include "backend/cpu/amx_pack.h"

namespace fattn::core::amx {

constexpr short kNanCode = 0x3f80, kInfCode = 0x4300, kMinusInfCode = 0x4680;  // 1, 128, 128^2
constexpr short kSomeWeight = 0x3f80, kNoWeight = 0x4301;                      // 1, 129
constexpr int kMostCodeSquares = 3;                                            // of 32 terms each: digits in base 128 do not carry

// Takes Inf and NaN out of a row of a tile and leaves their codes, all as NaN if they are to be. Returns their elements.
FATTN_AMX_INLINE __mmask32 split_row(char* row, char* codes, bool all_nan) {
  const __m512i x = _mm512_load_si512(row), magnitude = _mm512_and_si512(x, _mm512_set1_epi16(0x7fff)), infinity = _mm512_set1_epi16(kInfinityBits);
  const __mmask32 bad = _mm512_cmpge_epu16_mask(magnitude, infinity);
  __m512i code = _mm512_maskz_set1_epi16(bad, kNanCode);
  if (!all_nan) {
    const __mmask32 infinite = _mm512_cmpeq_epi16_mask(magnitude, infinity);
    code = _mm512_mask_set1_epi16(code, infinite, kInfCode);
    code = _mm512_mask_set1_epi16(code, infinite & _mm512_movepi16_mask(x), kMinusInfCode);
  }
  store_row(codes, 0, code);
  store_row(row, 0, _mm512_maskz_mov_epi16(~bad, x));
  return bad;
}

// Of all rows of a tile: the elements where some row has one.
static __mmask32 split_tile(char* tile, char* codes, bool all_nan) {
  __mmask32 any = 0;
  for (int64_t r = 0; r < 16; ++r) any |= split_row(tile + r * kTileRow, codes + r * kTileRow, all_nan);
  return any;
}

// The same of a tile whose row r holds pairs of the rows r and r + 16 of a tensor. Returns the bits of these.
static uint32_t split_pairs(char* tile, char* codes, bool all_nan) {
  uint32_t rows = 0;
  for (int64_t r = 0; r < 16; ++r) {
    const __mmask32 bad = split_row(tile + r * kTileRow, codes + r * kTileRow, all_nan);
    rows |= ((bad & 0x55555555u) != 0 ? 1u << r : 0) | ((bad & 0xaaaaaaaau) != 0 ? 0x10000u << r : 0);
  }
  return rows;
}

// Elements of tile rows hold the rows r and r + 16 of a tensor in turns. Their bits in its order.
static inline uint32_t in_order(__mmask32 elements) {
  uint32_t rows = 0;
  for (int r = 0; r < 16; ++r) rows |= (elements >> 2 * r & 1u) << r | (elements >> (2 * r + 1) & 1u) << (16 + r);
  return rows;
}

// Of a tile's rows that have an element of at least that magnitude, likewise.
static __mmask32 elements_from(const char* tile, int bits) {
  __mmask32 any = 0;
  for (int64_t r = 0; r < 16; ++r) {
    const __m512i magnitude = _mm512_and_si512(_mm512_load_si512(tile + r * kTileRow), _mm512_set1_epi16(0x7fff));
    any |= _mm512_cmpge_epu16_mask(magnitude, _mm512_set1_epi16(static_cast<short>(bits)));
  }
  return any;
}

// The kinds of pairs from their weights; `low` and `high` say which of the low and high halves count.
FATTN_AMX_INLINE __m512i kinds_of(__m512i weights, __mmask16 low, __mmask16 high) {
  const __mmask32 positive = _mm512_cmpgt_epi16_mask(weights, _mm512_setzero_si512());
  const __m512i kinds = _mm512_mask_set1_epi16(_mm512_set1_epi16(kNoWeight), positive, kSomeWeight);
  return _mm512_and_si512(kinds, _mm512_or_si512(_mm512_maskz_set1_epi32(low, 0xffff), _mm512_maskz_set1_epi32(high, static_cast<int>(0xffff0000u))));
}

// Are n vectors of floats all NaN? Then no code changes them, nor does a product with NaN.
static inline bool all_nan(const float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const __m512 y = _mm512_load_ps(x + i * kLanes);
    if (_mm512_cmp_ps_mask(y, y, _CMP_ORD_Q)) return false;
  }
  return true;
}

// Without the pairs of 32 keys that a bias of -Inf hides from 16 rows.
template <class Task>
__m512i without_hidden_by_bias(const Task& task, int64_t head, const vec::TilePlace& at, __m512i words) {
  alignas(64) float terms[32 * kLanes] = {};
  const __m512 hidden = _mm512_set1_ps(-__builtin_inff());
  __m512 unused = hidden;
  vec::add_terms<1, vec::bf16>(task.inputs, head, at, 1.0f, terms, &unused);
  for (int key = 0; key < at.keys && key < 32; ++key) {
    const __mmask16 hides = _mm512_cmp_ps_mask(_mm512_load_ps(terms + key * kLanes), hidden, _CMP_EQ_OQ);
    words = _mm512_mask_andnot_epi32(words, hides, _mm512_set1_epi32(static_cast<int>(1u << key)), words);
  }
  return words;
}

}  // namespace fattn::core::amx
