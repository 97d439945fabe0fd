// The random numbers of dropout, of one query head at a time.
#pragma once

#include "device_abi/dropout.h"
#include "kernels/ptx/half_words.h"

namespace fattn::v3 {

// core::philox() for the pairs of one head, as few operations as there can be: what is the same for all of them is computed once. Rounds are numbered
// from 0; the counter is (stream, query pair, call, stream's high word).
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

  __device__ __forceinline__ core::Philox4 planes(unsigned query, unsigned call) const {
    // The first three rounds, some of it the same for all queries of a call.
    const uint2 b = ptx::mul_wide(core::kPhiloxM1, call), a = ptx::mul_wide(core::kPhiloxM0, word0 ^ b.x);
    const uint2 of = ptx::mul_wide(core::kPhiloxM0, b.y ^ key0 ^ query);
    const uint2 other = ptx::mul_wide(core::kPhiloxM1, word2 ^ of.y);
    unsigned c[4] = {other.y ^ word1 ^ (key0 + 2 * core::kPhiloxW0), other.x, a.y ^ of.x ^ (key1 + 2 * core::kPhiloxW1), a.x};
#pragma unroll
    for (unsigned round = 3; round < core::kPhiloxRounds; ++round) {
      const unsigned k0 = key0 + round * core::kPhiloxW0, k1 = key1 + round * core::kPhiloxW1;
      const uint2 first = ptx::mul_wide(core::kPhiloxM0, c[0]), second = ptx::mul_wide(core::kPhiloxM1, c[2]);
      c[0] = second.y ^ c[1] ^ k0;
      c[1] = second.x;
      c[2] = first.y ^ c[3] ^ k1;
      c[3] = first.x;
    }
    return {{c[0], c[1], c[2], c[3]}};
  }

  // core::dropout_kept() of a query pair (core::dropout_query).
  template <class Below>
  __device__ __forceinline__ unsigned kept(unsigned query, unsigned call, const Below& below) const {
    return core::dropout_kept(planes(query, call), below);
  }
};

}  // namespace fattn::v3
