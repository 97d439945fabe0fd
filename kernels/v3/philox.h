// The random numbers of dropout, of one query head at a time.
#pragma once

#include "kernels/ptx/half_words.h"
#include "shared/dropout.h"

namespace fattn::v3 {

// core::philox() for the pairs of one head, as few operations as there can be: what is the same for all of them is computed once. Rounds are numbered
// from 0; the counter is (stream, number, call, stream's high word).
struct HeadOfPhilox {
  unsigned key0, key1;
  unsigned word0, word1, word2;  // that enter round 2; the first and the last lack what depends on the pair, word 3 is all that

  HeadOfPhilox() = default;
  __device__ __forceinline__ HeadOfPhilox(unsigned long long seed, unsigned long long stream)
      : key0(static_cast<unsigned>(seed)), key1(static_cast<unsigned>(seed >> 32)) {
    const uint2 a = ptx::mul_wide(core::kPhiloxM0, static_cast<unsigned>(stream));
    const uint2 b = ptx::mul_wide(core::kPhiloxM1, a.y ^ static_cast<unsigned>(stream >> 32) ^ key1);
    word0 = b.y ^ (key0 + core::kPhiloxW0);
    word1 = b.x;
    word2 = a.x ^ (key1 + core::kPhiloxW1);
  }

  // Words of the numbers `first` (even) and first + 1, side by side so that one need not wait for the other.
  __device__ __forceinline__ void words(unsigned (&c)[2][4], unsigned first, unsigned call) const {
    // The first three rounds, as far as they are the same for both.
    const uint2 b = ptx::mul_wide(core::kPhiloxM1, call), a = ptx::mul_wide(core::kPhiloxM0, word0 ^ b.x);
    const unsigned mixed = b.y ^ key0, next = a.y ^ (key1 + 2 * core::kPhiloxW1), key = key0 + 2 * core::kPhiloxW0;
#pragma unroll
    for (unsigned i = 0; i < 2; ++i) {
      const uint2 of = ptx::mul_wide(core::kPhiloxM0, mixed ^ first ^ i);
      const uint2 other = ptx::mul_wide(core::kPhiloxM1, word2 ^ of.y);
      c[i][0] = other.y ^ word1 ^ key;
      c[i][1] = other.x;
      c[i][2] = next ^ of.x;
      c[i][3] = a.x;
    }
#pragma unroll
    for (unsigned round = 3; round < core::kPhiloxRounds; ++round) {
      const unsigned k0 = key0 + round * core::kPhiloxW0, k1 = key1 + round * core::kPhiloxW1;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint2 a = ptx::mul_wide(core::kPhiloxM0, c[i][0]), b = ptx::mul_wide(core::kPhiloxM1, c[i][2]);
        c[i][0] = b.y ^ c[i][1] ^ k0;
        c[i][1] = b.x;
        c[i][2] = a.y ^ c[i][3] ^ k1;
        c[i][3] = a.x;
      }
    }
  }

  // core::dropout_kept() of query pair number / 2.
  template <class Below>
  __device__ __forceinline__ unsigned kept(unsigned number, unsigned call, const Below& below) const {
    unsigned c[2][4];
    words(c, number, call);
    return core::dropout_kept({{c[0][0], c[0][1], c[0][2], c[0][3]}}, {{c[1][0], c[1][1], c[1][2], c[1][3]}}, below);
  }
};

}  // namespace fattn::v3
