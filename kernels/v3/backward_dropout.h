// Dropout in the v3 backward kernel. Random numbers are made beside the warpgroups that compute, by warps that would be idle, and come as one bit a
// pair through shared memory: a word for each thread and block, of its 32 pairs.
//
// Scores are transposed (v3/backward_fragments.h), so a call of Philox has the numbers of two keys in each of four places that two warps share: a
// lane of the making warp takes all 16 queries of a column pair and the keys of one call of one block of 32, which are whole words of four threads.
//
// A dropped pair has weight 0 for dv, and 0 in the place of dP. 1 / (1 - T / 65536) enters with the factors at the end: of dv, and of dq and dk, for
// which the first kernel divides row sums by it. So dS = P (dP - row_sum) of a pair that stays, and -P row_sum of one that does not.
#pragma once

#include "kernels/pair.h"
#include "kernels/ptx/convert.h"
#include "kernels/ptx/mbarrier.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/shared_pair.h"
#include "kernels/ptx/warp.h"
#include "kernels/v3/backward_fragments.h"
#include "kernels/v3/backward_schedule.h"
#include "kernels/v3/backward_shape.h"

namespace fattn::v3 {

// Of the thread's pair s[4 i + e] it is bit 8 e + 7 - i, set if the pair stays.
template <class Spec>
struct KeptBits {
  using Shape = BackwardShape<Spec>;
  const unsigned shared;
  const BackwardBarriers<Spec> barriers;

  __device__ __forceinline__ unsigned words(int group) const { return shared + static_cast<unsigned>(Shape::kOffsetKept + kKeptBytes * group); }

  // Warp 1 of the loader's makes the bits of the first 64 keys, the next one those of the next. Found again at each call, as own_lane().
  static __device__ __forceinline__ int maker() { return static_cast<int>(ptx::opaque(threadIdx.x)) / 32 % 4 - 1; }

  // core::dropout_words() with a key that goes through its rounds' values where it is, and back: the makers have few registers.
  static __device__ __forceinline__ core::Philox4 words_of(unsigned (&key)[2], unsigned long long stream, int query, int call) {
    unsigned c0 = static_cast<unsigned>(stream), c1 = static_cast<unsigned>(query), c2 = static_cast<unsigned>(call),
             c3 = static_cast<unsigned>(stream >> 32);
#pragma unroll
    for (int round = 0; round < core::kPhiloxRounds; ++round) {
      const unsigned long long a = static_cast<unsigned long long>(core::kPhiloxM0) * c0, b = static_cast<unsigned long long>(core::kPhiloxM1) * c2;
      c0 = static_cast<unsigned>(b >> 32) ^ c1 ^ key[0];
      c1 = static_cast<unsigned>(b);
      c2 = static_cast<unsigned>(a >> 32) ^ c3 ^ key[1];
      c3 = static_cast<unsigned>(a);
      const bool last = round == core::kPhiloxRounds - 1;
      key[0] = ptx::opaque(key[0] + (last ? (1u - core::kPhiloxRounds) * core::kPhiloxW0 : core::kPhiloxW0));
      key[1] = ptx::opaque(key[1] + (last ? (1u - core::kPhiloxRounds) * core::kPhiloxW1 : core::kPhiloxW1));
    }
    return {{c0, c1, c2, c3}};
  }

  // By one warp: the words of all blocks that the keys meet.
  __device__ __forceinline__ void make(const BackwardCall& p, TilePlace tile) const {
    const int block = (tile.key() + 64 * maker()) / core::kDropoutBlock + static_cast<int>(own_lane()) / 16;
    Dropout<kPairOf<Spec>> numbers(p.call, tile.batch(), tile.head_k() * p.call.group);
    unsigned key[2] = {static_cast<unsigned>(numbers.seed), static_cast<unsigned>(numbers.seed >> 32)};
    int row = tile.first_row();
#pragma unroll 1
    for (int step = 0; step < tile.blocks() * p.call.group; ++step) {
      unsigned kept[4] = {};  // of keys lane / 4 % 4 * 2, of the next one, and of those 16 further
      // First the odd columns of the block, then the even ones: each number's bit comes in at the end of the place for its column and key, and goes
      // up.
#pragma unroll 1
      for (int i = 0; i < 16; ++i) {
        const int lane = static_cast<int>(own_lane());
        const core::Philox4 of =
            words_of(key, numbers.stream, row + lane % 4 * 2 + i % 8 * 8 + (i < 8 ? 1 : 0), block * core::kDropoutCalls + lane / 4 % 4);
#pragma unroll
        for (unsigned& word : kept) word <<= 1;
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          if ((of.word[w] & 0xffffu) >= numbers.below) kept[w / 2 * 2] |= w % 2 == 0 ? 1u : 0x10000u;
          if (of.word[w] >> 16 >= numbers.below) kept[w / 2 * 2 + 1] |= w % 2 == 0 ? 1u : 0x10000u;
        }
      }
      ptx::mbarrier_wait(barriers.kept_empty(maker()), step % 2 ^ 1);
      ptx::st_shared_16(words(maker()) + 16 * own_lane(), uint4{kept[0], kept[1], kept[2], kept[3]});
      ptx::warp_sync();
      if (own_lane() == 0) ptx::mbarrier_arrive(barriers.kept_full(maker()));
      row += Shape::kBlockM;
      if (row >= tile.template rows_end<typename Spec::Mask, Shape::kPacked>(p)) {  // of the next query head
        row = tile.first_row();
        ++numbers.stream;
      }
    }
  }

  // By the warpgroup of the keys: the thread's word of its `step`th block.
  __device__ __forceinline__ unsigned take(int group, unsigned step) const {
    ptx::mbarrier_wait(barriers.kept_full(group), step % 2);
    const unsigned lane = own_lane(), warp = own_warp_row() / 16;
    const unsigned word = ptx::ld_shared_4(words(group) + (warp / 2 * 16 + lane / 8 * 4 + lane % 4) * 16 + (warp % 2 * 2 + lane / 4 % 2) * 4);
    ptx::warp_sync();
    if (lane == 0) ptx::mbarrier_arrive(barriers.kept_empty(group));
    return word;
  }
};

// All ones in the halves of two neighbouring queries' pairs that stay: s[2 i] and s[2 i + 1].
__device__ __forceinline__ unsigned kept_halves(unsigned kept, int i) {
  unsigned halves;
  if (i % 2 == 0)
    asm("prmt.b32 %0, %1, %1, 0x9988;" : "=r"(halves) : "r"(kept << (i / 2)));  // each byte's highest bit, twice
  else
    asm("prmt.b32 %0, %1, %1, 0xbbaa;" : "=r"(halves) : "r"(kept << (i / 2)));
  return halves;
}

// P as dv takes it: -0 where it is dropped, which nothing else is.
__device__ __forceinline__ void drop(unsigned (&weights)[4][4], unsigned kept) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const unsigned halves = kept_halves(kept, i);
    unsigned& pair = weights[i / 4][i % 4];
    pair = (pair & halves) | (0x80008000u & ~halves);
  }
}

// What `weights` lack of P, in bf16: what rounding took away, or all.
template <class Element>
__device__ __forceinline__ void keep_difference(unsigned (&rest)[4][4], const unsigned (&weights)[4][4], const float (&p)[32]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const unsigned pair = weights[i / 4][i % 4];
    rest[i / 4][i % 4] = ptx::cvt_bf16x2(p[2 * i] - ptx::low_float<Element>(pair), p[2 * i + 1] - ptx::high_float<Element>(pair));
  }
}

// dS in place of what keep_difference() kept; `dp` is dP less row sums.
template <class Element>
__device__ __forceinline__ void multiply_kept(unsigned (&rest)[4][4], const unsigned (&weights)[4][4], const float (&dp)[32], unsigned row_sums) {
  const unsigned from = row_sums + own_lane() % 4 * 8;
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    const float2 sum = ptx::ld_shared_f32x2(from + static_cast<unsigned>(16 * i));
#pragma unroll
    for (int key = 0; key < 2; ++key) {
      const unsigned pair = weights[(i + key) / 4][(i + key) % 4];
      unsigned& to = rest[(i + key) / 4][(i + key) % 4];
      const float low = (pair & 0x8000u) != 0 ? -sum.x : dp[2 * (i + key)], high = static_cast<int>(pair) < 0 ? -sum.y : dp[2 * (i + key) + 1];
      to = ptx::pack2<Element>((ptx::low_float<Element>(pair) + ptx::low_float<bf16>(to)) * low,
                               (ptx::high_float<Element>(pair) + ptx::high_float<bf16>(to)) * high);
    }
  }
}

// By role the sign of P says that the pair is dropped.
__device__ __forceinline__ void mark_dropped(float (&p)[32], unsigned kept) {
#pragma unroll
  for (int i = 0; i < 32; ++i) p[i] = __uint_as_float(__float_as_uint(p[i]) | (~(kept << (24 - 8 * (i % 4) + i / 4)) & 0x80000000u));
}
__device__ __forceinline__ void drop_marked(unsigned (&weights)[4][4]) {
#pragma unroll
  for (unsigned& pair : reinterpret_cast<unsigned(&)[16]>(weights)) {
    unsigned signs;
    asm("prmt.b32 %0, %1, %1, 0xbb99;" : "=r"(signs) : "r"(pair));
    pair &= ~signs;
  }
}

}  // namespace fattn::v3
