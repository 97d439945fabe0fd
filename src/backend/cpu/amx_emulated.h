// The tile instructions of AMX in AVX-512, so that the kernels for them can be tested where no processor has them (FATTN_EMULATE_AMX). Not in the
// library.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace fattn::core::amx {

// Not inlined: the compiler would unroll hundreds of them, for minutes.
#define FATTN_EMULATED static inline __attribute__((noinline))

struct alignas(64) EmulatedTile {
  uint32_t rows[16][16];
};
static thread_local EmulatedTile emulated_tiles[8];
static thread_local bool emulated_configured = false;  // tiles that are not configured raise an illegal instruction

static inline uint32_t (&emulated_rows(int tile))[16][16] {
  if (!emulated_configured) __builtin_trap();
  return emulated_tiles[tile].rows;
}
FATTN_EMULATED void emulated_zero(int tile) { __builtin_memset(emulated_rows(tile), 0, sizeof(EmulatedTile)); }
FATTN_EMULATED void emulated_load(int tile, const void* from, int64_t stride) {
  auto& rows = emulated_rows(tile);
  for (int i = 0; i < 16; ++i) __builtin_memcpy(rows[i], static_cast<const char*>(from) + i * stride, sizeof rows[i]);
}
FATTN_EMULATED void emulated_store(int tile, void* to, int64_t stride) {
  const auto& rows = emulated_rows(tile);
  for (int i = 0; i < 16; ++i) __builtin_memcpy(static_cast<char*>(to) + i * stride, rows[i], sizeof rows[i]);
}
// c += a b, where an element of a and b is a pair of bf16.
FATTN_EMULATED void emulated_dot(int c, int a, int b) {
  auto &sums = emulated_rows(c), &left = emulated_rows(a), &right = emulated_rows(b);
  for (int i = 0; i < 16; ++i) {
    __m512 sum = _mm512_load_ps(sums[i]);
    for (int j = 0; j < 16; ++j)
      sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(left[i][j])), (__m512bh)_mm512_load_si512(right[j]));
    _mm512_store_ps(sums[i], sum);
  }
}

}  // namespace fattn::core::amx
