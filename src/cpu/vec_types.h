// Storage types of kernels for a CPU, and what a Vec layer (vec_portable.h, vec_avx2.h, ...) offers in namespace FATTN_ISA:
//   F32, kLanes             a vector of fp32
//   kPanelVecs              vectors in a row of the matrix micro-kernel
//   kFetchesAhead           whether rows are fetched into the L2 cache before they are copied
//   kInPlace                elements between fp32 rows up to which kernels read them where they lie
//   set1 zero load store    unaligned; load and store convert from and to f16 and bf16 (round to nearest even), load from uint8_t
//   add sub mul div fma     fma(a, b, c) = a * b + c
//   sqrt                    rounded to nearest
//   max(a, b)               a > b ? a : b, so b if either is NaN
//   where_equal(a, b, x, y) a == b ? x : y
//   all_smaller(x, limit)   whether every |x| < limit; false if there is a NaN
//   keep_from(x, i, other)  lanes >= i from x, the rest from other; i of any size
//   keep_below(x, i, other) lanes < i from x, the rest from other
//   sum, largest_lane       of all lanes; which is largest is open if there is a NaN
//   exp2                    2^x for x <= 0, exact 0 below -127 (AVX-512: -125), NaN kept; relative error below 2e-7
//   exp2_weight             the same, but 0 below 2^kLeastWeight
//   transpose               of kLanes vectors
//   sum_each                lane i: sum of all lanes of vector i of kLanes
//   U32                     a vector of uint32_t: set1_u32, load_u32, store_u32, xor_u32
//   multiply_wide(x, m, &high, &low)  the halves of the 64-bit products
//   keep_not_below(x, word, limit)    x where word >= limit, else 0
//   keep_if(x, word, bit)             x where word has the bit, else 0
//   where_bit(word, bit, x, y)        x where word has the bit, else y
//   nonzero_bytes(p)        which of 32 bytes are not 0, the first in the lowest bit
// and, where kHasDot:
//   Pairs                   a vector of kLanes (bf16, bf16) pairs
//   load_pairs, store_pairs, set1_pair; load_pairs of bf16: of neighbours
//   interleave(a, b, &first, &second)  pairs of two rows of 2 kLanes values
//   dot(acc, a, b)          acc + a.lo * b.lo + a.hi * b.hi
//   finite_halves(a)        a with 0 for Inf and NaN
//   keep_halves(a, word, n) the low halves of a where word has bit n, the high ones where it has bit n + 16, else 0
#pragma once

#include <stdint.h>

#include "shared/half.h"

namespace fattn::core::FATTN_ISA {

struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

// One element of any of these.
static inline float to_float(float x) { return x; }
static inline float to_float(f16 x) { return f16_to_float(x.bits); }
static inline float to_float(bf16 x) { return bf16_to_float(x.bits); }
static inline void from_float(float x, float* to) { *to = x; }
static inline void from_float(float x, f16* to) { to->bits = float_to_f16(x); }
static inline void from_float(float x, bf16* to) { to->bits = float_to_bf16(x); }

// nonzero_bytes() for layers without an instruction for it. The lowest byte is the first (little endian).
static inline uint32_t nonzero_bytes_by_words(const uint8_t* p) {
  constexpr uint64_t kTops = 0x8080808080808080u;
  uint32_t bits = 0;
  for (int i = 0; i < 4; ++i) {
    uint64_t x;
    __builtin_memcpy(&x, p + i * 8, sizeof x);
    x = (((x & ~kTops) + ~kTops) | x) & kTops;                                       // the highest bit of each byte that is not 0
    bits |= static_cast<uint32_t>((x >> 7) * 0x0102040810204080u >> 56) << (i * 8);  // brought together
  }
  return bits;
}

}  // namespace fattn::core::FATTN_ISA
