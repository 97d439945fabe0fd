// AMX tiles of the bf16 kernels: their one configuration, and the vector helpers that prepare and finish them.
//
// A tile is 16 rows of 64 bytes. TDPBF16PS computes C (16 x 16 fp32) += A (16 x 32 bf16) * B (32 x 16 bf16), where B is
// stored as 16 rows of 16 pairs: B[r][n] holds the elements 2r and 2r + 1 of column n. All tiles in memory are 1 KiB,
// contiguous, so tile loads never meet page or cache-set conflicts of the caller's strides.
#pragma once

#include <immintrin.h>

#include "backend/cpu/kernels.h"
#ifdef FATTN_EMULATE_AMX
#include "backend/cpu/amx_emulated.h"
#endif

// The tile instructions. The number of a tile is part of the instruction, hence macros.
#ifdef FATTN_EMULATE_AMX
#define FATTN_TILE_ZERO(tile) emulated_zero(tile)
#define FATTN_TILE_LOAD(tile, from, stride) emulated_load(tile, from, stride)
#define FATTN_TILE_STORE(tile, to, stride) emulated_store(tile, to, stride)
#define FATTN_TILE_DOT(c, a, b) emulated_dot(c, a, b)
#else
#define FATTN_TILE_ZERO(tile) _tile_zero(tile)
#define FATTN_TILE_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define FATTN_TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define FATTN_TILE_DOT(c, a, b) _tile_dpbf16ps(c, a, b)
#endif

namespace fattn::core::amx {

constexpr int64_t kTileBytes = 1024;
constexpr int64_t kTileRow = 64;
constexpr int kLanes = 16;      // columns of an accumulator; fp32 lanes of a vector
constexpr int kTileDepth = 32;  // bf16 elements that one product contracts

#define FATTN_AMX_INLINE static inline __attribute__((always_inline))
#define FATTN_AMX_INLINE_MEMBER inline __attribute__((always_inline))

FATTN_AMX_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
FATTN_AMX_INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
FATTN_AMX_INLINE int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

// The tile loads of g++ are assembler without a memory operand: the compiler must not move vector stores past them.
FATTN_AMX_INLINE void memory_barrier() { __asm__ volatile("" ::: "memory"); }

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Tiles are configured while an object of this type lives.
class TileScope {
 public:
#ifdef FATTN_EMULATE_AMX
  TileScope() { emulated_configured = true; }
  ~TileScope() { emulated_configured = false; }
#else
  TileScope() {
    const TileConfig config;
    _tile_loadconfig(&config);
  }
  ~TileScope() { _tile_release(); }
#endif
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};

// Transposes a 16 x 16 matrix of 32-bit elements held in 16 vectors.
FATTN_AMX_INLINE void transpose16(__m512i (&x)[16]) {
  __m512i y[16];
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
    y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
    y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
    y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
    x[i + 4] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0x88);
    x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
    x[i + 12] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0xdd);
  }
}

// Lane i of the result is the sum of the lanes of x[i], in an order of its own.
FATTN_AMX_INLINE __m512 row_sums16(const __m512 (&x)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; ++i) t[i] = _mm512_castps_si512(x[i]);
  transpose16(t);
  __m512 sum = _mm512_setzero_ps();
  for (int i = 0; i < 16; ++i) sum = _mm512_add_ps(sum, _mm512_castsi512_ps(t[i]));
  return sum;
}

FATTN_AMX_INLINE __mmask32 first_lanes32(int64_t n) { return n >= 32 ? ~__mmask32{0} : n <= 0 ? __mmask32{0} : (__mmask32{1} << n) - 1; }
FATTN_AMX_INLINE __mmask16 first_lanes16(int64_t n) {
  return n >= 16 ? static_cast<__mmask16>(0xffff) : n <= 0 ? static_cast<__mmask16>(0) : static_cast<__mmask16>((1u << n) - 1u);
}

// fp32 to bf16, round to nearest even.
FATTN_AMX_INLINE __m256i to_bf16(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

}  // namespace fattn::core::amx
