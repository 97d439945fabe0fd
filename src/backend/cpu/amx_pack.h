// Brings rows of bf16 tensors into AMX tiles. Rows past `rows` and elements past `headdim` become zero; no element past
// a row's headdim is read.
#pragma once

#include "backend/cpu/amx_tile.h"

namespace fattn::core::amx {

constexpr int kInfinityBits = 0x7f80;  // of bf16

FATTN_AMX_INLINE __m512i load_row(const uint16_t* x, int64_t stride, int64_t row, int64_t rows, int64_t d, int64_t headdim) {
  if (row >= rows) return _mm512_setzero_si512();
  if (d + 32 <= headdim) return _mm512_loadu_si512(x + row * stride + d);
  return _mm512_maskz_loadu_epi16(first_lanes32(headdim - d), x + row * stride + d);
}

FATTN_AMX_INLINE void store_row(void* tile, int64_t row, __m512i x) { _mm512_store_si512(static_cast<char*>(tile) + row * kTileRow, x); }

// 16 rows as A tiles: to[d / 32][row][d % 32]. Returns the squared norm of every row.
static __m512 pack_rows(const uint16_t* x, int64_t stride, int64_t rows, int headdim, char* to) {
  __m512 norm[16];
  for (int64_t r = 0; r < 16; ++r) {
    norm[r] = _mm512_setzero_ps();
    for (int64_t d = 0; d < headdim; d += 32) {
      const __m512i v = load_row(x, stride, r, rows, d, headdim);
      store_row(to + d / 32 * kTileBytes, r, v);
      norm[r] = _mm512_dpbf16_ps(norm[r], (__m512bh)v, (__m512bh)v);
    }
  }
  return row_sums16(norm);
}

// 16 rows as B tiles that contract over d: to[d / 32][(d % 32) / 2][row][d % 2]; `flip` is xor'ed to every pair of
// elements. Returns the squared norm of every row.
static __m512 pack_transposed(const uint16_t* x, int64_t stride, int64_t rows, int headdim, uint32_t flip, char* to) {
  __m512 norm = _mm512_setzero_ps();
  const __m512i sign = _mm512_set1_epi32(static_cast<int>(flip));
  for (int64_t d = 0; d < headdim; d += 32) {
    __m512i v[16];
    for (int64_t r = 0; r < 16; ++r) v[r] = _mm512_xor_si512(load_row(x, stride, r, rows, d, headdim), sign);
    transpose16(v);
    for (int64_t r = 0; r < 16; ++r) {
      norm = _mm512_dpbf16_ps(norm, (__m512bh)v[r], (__m512bh)v[r]);
      store_row(to + d / 32 * kTileBytes, r, v[r]);
    }
  }
  return norm;
}

// 32 rows as A tiles of the transposed matrix: to[d / 16][d % 16][...], where the elements 2r and 2r + 1 of a tile row
// are the rows r and r + 16: the order in which pair_bf16 of two accumulators' rows leaves the other operand.
// Writes ceil(headdim / 32) * 2 tiles. Returns the largest magnitude as bits of bf16, pairwise.
static __m512i pack_transposed_rows(const uint16_t* x, int64_t stride, int64_t rows, int headdim, char* to) {
  __m512i largest = _mm512_setzero_si512();
  const __m512i magnitude = _mm512_set1_epi32(0x7fff7fff);
  for (int64_t d = 0; d < headdim; d += 32) {
    __m512i lo[16], hi[16];
    for (int64_t r = 0; r < 16; ++r) {
      const __m512i a = load_row(x, stride, r, rows, d, headdim), b = load_row(x, stride, r + 16, rows, d, headdim);
      largest = _mm512_max_epu16(largest, _mm512_max_epu16(_mm512_and_si512(a, magnitude), _mm512_and_si512(b, magnitude)));
      lo[r] = _mm512_unpacklo_epi16(a, b);  // d = 0..3, 8..11, 16..19, 24..27
      hi[r] = _mm512_unpackhi_epi16(a, b);  // d = 4..7, ...
    }
    transpose16(lo);
    transpose16(hi);
    char* tiles = to + d / 16 * kTileBytes;
    for (int64_t r = 0; r < 16; ++r) {
      const int64_t at = r / 4 * 8 + r % 4;
      store_row(tiles, at, lo[r]);  // rows run through both tiles
      store_row(tiles, at + 4, hi[r]);
    }
  }
  return largest;
}

// 32 rows as B tiles that contract over rows: to[d / 16][r][d % 16][0, 1] with the rows r and r + 16 as a pair.
// Writes ceil(headdim / 32) * 2 tiles.
static void pack_pairs(const uint16_t* x, int64_t stride, int64_t rows, int headdim, char* to) {
  const __m512i first = _mm512_set_epi32(0x002f000f, 0x002e000e, 0x002d000d, 0x002c000c, 0x002b000b, 0x002a000a, 0x00290009, 0x00280008, 0x00270007,
                                         0x00260006, 0x00250005, 0x00240004, 0x00230003, 0x00220002, 0x00210001, 0x00200000);
  const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  for (int64_t d = 0; d < headdim; d += 32)
    for (int64_t r = 0; r < 16; ++r) {
      const __m512i a = load_row(x, stride, r, rows, d, headdim), b = load_row(x, stride, r + 16, rows, d, headdim);
      char* tiles = to + d / 16 * kTileBytes;
      store_row(tiles, r, _mm512_permutex2var_epi16(a, first, b));
      store_row(tiles + kTileBytes, r, _mm512_permutex2var_epi16(a, second, b));
    }
}

// Largest 16-bit element.
FATTN_AMX_INLINE int largest_epu16(__m512i x) {
  const __m512i even = _mm512_and_si512(x, _mm512_set1_epi32(0xffff)), odd = _mm512_srli_epi32(x, 16);
  return _mm512_reduce_max_epi32(_mm512_max_epi32(even, odd));
}

}  // namespace fattn::core::amx
