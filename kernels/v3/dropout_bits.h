// Dropout in v3's forward pass. Which weights stay follows from their place alone (shared/dropout.h), so the bits need not wait for scores: warps
// that have nothing else to do make them, some blocks ahead of the consumers, in a ring in shared memory beside those of keys and values.
//
// A unit is what a consumer warp needs of a block: each lane's own bits, in the order of its scores. 8-key tile n of row `half` has bit at(half, n)
// for its even key and the bit 16 above for its odd one, of word word(half).
#pragma once

#include "kernels/pair.h"
#include "kernels/ptx/half_words.h"
#include "kernels/ptx/mbarrier.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/ptx/warp.h"
#include "kernels/v3/forward_shape.h"
#include "kernels/v3/ring.h"
#include "kernels/v3/schedule.h"
#include "shared/v3_forward_work.h"

namespace fattn::v3 {

template <int kBlockN>
struct DropoutUnit {
  static constexpr int kWords = kBlockN / 64;  // of a lane: both rows in one, or a word each
  static constexpr int kBytes = 32 * 4 * kWords;
  static constexpr int kCalls = kBlockN / core::kDropoutBlock;  // of Philox, of a lane for a row
  static_assert(kBlockN == 64 || kBlockN == 128);

  static constexpr int word(int half) { return kWords == 1 ? 0 : half; }
  static constexpr int at(int half, int tile) { return kWords == 1 ? 8 * half + tile : tile; }

  static __device__ __forceinline__ void store(unsigned unit, int lane, const unsigned (&rows)[2]) {
    if constexpr (kWords == 1)
      ptx::st_shared_4(unit + static_cast<unsigned>(lane * 4), rows[0] + (rows[1] << 8));
    else
      ptx::st_shared_8(unit + static_cast<unsigned>(lane * 8), {rows[0], rows[1]});
  }
  static __device__ __forceinline__ void load(unsigned (&kept)[kWords], unsigned unit, int lane) {
    if constexpr (kWords == 1) {
      kept[0] = ptx::ld_shared_4(unit + static_cast<unsigned>(lane * 4));
    } else {
      const uint2 both = ptx::ld_shared_8(unit + static_cast<unsigned>(lane * 8));
      kept[0] = both.x;
      kept[1] = both.y;
    }
  }

  // Weights of a block as they are stored, the operand of wgmma: those that are dropped become 0.
  static __device__ __forceinline__ void drop(unsigned (&weights)[kBlockN / 16][4], const unsigned (&kept)[kWords]) {
#pragma unroll
    for (int i = 0; i < kBlockN / 4; ++i) {
      const int bit = at(i % 2, i / 2);
      const unsigned x = kept[word(i % 2)] << (7 - bit % 8);
      weights[i / 4][i % 4] &= bit < 8 ? ptx::spread_signs<0, 2>(x) : ptx::spread_signs<1, 3>(x);
    }
  }
};

// core::philox() for the pairs of one head, as few operations as there can be: what is the same for all of them is computed once. Rounds are numbered
// from 0; the counter is (stream, query, call, stream's high word).
struct HeadOfPhilox {
  unsigned key0, key1;
  unsigned word0, word1, word2;  // that enter round 2; the first and the last lack what depends on the pair, word 3 is all that

  __device__ __forceinline__ HeadOfPhilox(unsigned long long seed, unsigned long long stream)
      : key0(static_cast<unsigned>(seed)), key1(static_cast<unsigned>(seed >> 32)) {
    const uint2 a = ptx::mul_wide(core::kPhiloxM0, static_cast<unsigned>(stream));
    const uint2 b = ptx::mul_wide(core::kPhiloxM1, a.y ^ static_cast<unsigned>(stream >> 32) ^ key1);
    word0 = b.y ^ (key0 + core::kPhiloxW0);
    word1 = b.x;
    word2 = a.x ^ (key1 + core::kPhiloxW1);
  }

  // Words of two queries, side by side so that one need not wait for the other.
  __device__ __forceinline__ void words(unsigned (&c)[2][4], unsigned query0, unsigned query1, unsigned call) const {
    const uint2 b = ptx::mul_wide(core::kPhiloxM1, call);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint2 a = ptx::mul_wide(core::kPhiloxM0, b.y ^ (i == 0 ? query0 : query1) ^ key0);
      c[i][0] = word0 ^ b.x;
      c[i][1] = word1;
      c[i][2] = word2 ^ a.y;
      c[i][3] = a.x;
    }
#pragma unroll
    for (unsigned round = 2; round < core::kPhiloxRounds; ++round) {
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
};

// Makes the bits of all blocks that the CTA's tiles meet: warp `nth_warp` of kWarps. All lanes of the warp together.
template <class Spec, int kWarps>
__device__ __forceinline__ void make_dropout_bits(const ForwardCall& p, unsigned shared, Barriers<Spec> barriers, int nth_warp) {
  using Shape = ForwardShape<Spec>;
  using Unit = DropoutUnit<Spec::kBlockN>;
  using Mask = typename Spec::Mask;
  constexpr int kUnits = 4 * Shape::kGroups;
  const PairParams& pairs = pairs_of(p.call);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned most = (pairs.dropout_below - 1) * 0x10001u, minus_most = ((65536 - (pairs.dropout_below - 1)) & 0xffffu) * 0x10001u;
  // Of both numbers of a word: 1 if it is at least dropout_below, else 0.
  const auto kept = [&](unsigned word) { return ptx::min_u16x2(ptx::add_u16x2(ptx::max_u16x2(word, most), minus_most), 0x10001u); };

  Ring<kV3DropoutStages> ring;
  int unit = nth_warp;
#pragma unroll 1
  for (int nth = 0;; ++nth) {
    const int number = tile_number<Spec>(p, nth);
    if (number < 0) break;
    const auto place = place_of<Spec, Shape::kBlockM>(p, number);
    const HeadOfPhilox head(pairs.dropout_state[0], pairs.dropout_state[1] +
                                                        static_cast<unsigned long long>(place.entry()) * static_cast<unsigned>(p.call.nheads) +
                                                        static_cast<unsigned>(place.head));
    const auto keys = keys_of<Spec>(p.call, place);
    const int first = block_begin<Mask, Shape::kBlockN>(p.call, keys, place.row);
    int block = block_end<Mask, Shape::kBlockN>(p.call, keys, place.row, Shape::kBlockM) - 1;
    const unsigned first_query = static_cast<unsigned>(place.row + lane / 4);
#pragma unroll 1
    do {
#pragma unroll 1
      for (; unit < kUnits; unit += kWarps) {
        const unsigned query = first_query + static_cast<unsigned>(unit * 16);
        unsigned call = static_cast<unsigned>(block * (Unit::kCalls * core::kDropoutCalls) + lane % 4);
        unsigned bits[2] = {0, 0};  // of each row; from call to call down 4 places
#pragma unroll 1
        for (int i = 0; i < Unit::kCalls; ++i, call += core::kDropoutCalls) {
          unsigned words[2][4];
          head.words(words, query, query + 8, call);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            bits[half] >>= 4;
#pragma unroll
            for (int w = 0; w < 4; ++w) bits[half] += kept(words[half][w]) << (4 * (Unit::kCalls - 1) + w);
          }
        }
        ptx::mbarrier_wait(barriers.bits_empty(ring.stage), ring.parity ^ 1);
        Unit::store(shared + Shape::kOffsetBits + ring.stage * Shape::kBitBytes + static_cast<unsigned>(unit * Unit::kBytes), lane, bits);
        ptx::warp_sync();
        if (lane == 0) ptx::mbarrier_arrive(barriers.bits_full(ring.stage));
      }
      unit -= kUnits;
      ring.next();
    } while (block-- > first);
  }
}

}  // namespace fattn::v3
