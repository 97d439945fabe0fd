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

// Of the thread's pair s[4 i + e] it is bit 31 - m, m = 16 (i / 4) + 8 (e % 2) + 2 (i % 4) + e / 2, set if the pair is dropped: four pairs that are 8
// bits apart are two of each of two keys' neighbouring queries.
template <class Spec>
struct DroppedBits {
  using Shape = BackwardShape<Spec>;
  static constexpr int kAtOnce = Shape::kDropoutCalls;  // of Philox
  static constexpr int kUnits = 2 * Shape::kKeyGroups;  // that a block's bits are made in: of 64 keys and 32 queries
  const unsigned shared;
  const BackwardBarriers<Spec> barriers;

  __device__ __forceinline__ unsigned words(int group) const { return shared + static_cast<unsigned>(Shape::kOffsetDropped + kDroppedBytes * group); }

  // core::philox() of some counters, with a key that goes through its rounds' values where it is, and back: the makers have few registers.
  static __device__ __forceinline__ void rounds(core::Philox4 (&of)[kAtOnce], unsigned (&key)[2]) {
#pragma unroll
    for (int round = 0; round < core::kPhiloxRounds; ++round) {
#pragma unroll
      for (core::Philox4& x : of) {
        unsigned(&c)[4] = x.word;
        const unsigned long long a = static_cast<unsigned long long>(core::kPhiloxM0) * c[0],
                                 b = static_cast<unsigned long long>(core::kPhiloxM1) * c[2];
        c[0] = static_cast<unsigned>(b >> 32) ^ c[1] ^ key[0];
        c[1] = static_cast<unsigned>(b);
        c[2] = static_cast<unsigned>(a >> 32) ^ c[3] ^ key[1];
        c[3] = static_cast<unsigned>(a);
      }
      const bool last = round == core::kPhiloxRounds - 1;
      key[0] = ptx::opaque(key[0] + (last ? (1u - core::kPhiloxRounds) * core::kPhiloxW0 : core::kPhiloxW0));
      key[1] = ptx::opaque(key[1] + (last ? (1u - core::kPhiloxRounds) * core::kPhiloxW1 : core::kPhiloxW1));
    }
  }

  // Where a maker is: words of Philox's counter that its head gives, the block's first row, blocks before. In shared memory, because registers are
  // few.
  __device__ __forceinline__ unsigned state() const {
    return shared + static_cast<unsigned>(Shape::kOffsetMakers) + ptx::opaque(threadIdx.x) / 32 % 4 * kMakerBytes;
  }
  __device__ __forceinline__ void begin(unsigned long long stream, int row) const {
    ptx::st_shared_16(state(), uint4{static_cast<unsigned>(stream), static_cast<unsigned>(stream >> 32), static_cast<unsigned>(row), 0});
  }
  // To block `step`; all lanes write the same.
  __device__ __forceinline__ void go_to(const BackwardCall& p, TilePlace tile, unsigned step) const {
    uint4 at = ptx::ld_shared_16(state());
    for (; at.w < step; ++at.w) {
      at.z += Shape::kBlockM;
      if (static_cast<int>(at.z) >= tile.template rows_end<typename Spec::Mask>(p)) {  // of the next query head
        at.z = static_cast<unsigned>(tile.first_row());
        if (++at.x == 0) ++at.y;
      }
    }
    ptx::warp_sync();
    ptx::st_shared_16(state(), at);
    ptx::warp_sync();
  }

  // By warps 1 to 3 of the loader's warpgroup: every third unit.
  __device__ __forceinline__ void make(const BackwardCall& p) const {
    const TilePlace tile{shared + Shape::kOffsetTile};
    const BackwardBarriers<Spec> barriers{shared + Shape::kOffsetBarriers};
    unsigned key[2];
    {
      const Dropout<kPairOf<Spec>> numbers(p.call, tile.batch(), tile.head_k() * p.call.group);
      key[0] = static_cast<unsigned>(numbers.seed);
      key[1] = static_cast<unsigned>(numbers.seed >> 32);
      begin(numbers.stream, tile.first_row());
      ptx::warp_sync();
    }
    const unsigned below = pairs_of(p.call).dropout_below;
#pragma unroll 1
    for (int unit = ptx::warp_id() % 4 - 1; unit < tile.blocks() * p.call.group * kUnits; unit += kDropoutMakers) {
      go_to(p, tile, static_cast<unsigned>(unit / kUnits));
      unsigned dropped[4] = {};  // of keys lane / 4 % 4 * 2, of the next one, and of those 16 further
#pragma unroll 1
      for (int n = 0; n < 8; n += kAtOnce) {  // the even columns and then the odd ones
        core::Philox4 of[kAtOnce];
        {
          const uint4 at = ptx::ld_shared_16(state());
          const int lane = static_cast<int>(own_lane());
          of[0] = {
              {at.x, at.z + static_cast<unsigned>(unit % 2 * 32 + n % 4 * 8 + n / 4 + lane % 4 * 2),
               static_cast<unsigned>(((tile.key() + unit % kUnits / 2 * 64) / core::kDropoutBlock + lane / 16) * core::kDropoutCalls + lane / 4 % 4),
               at.y}};
#pragma unroll
          for (unsigned i = 1; i < kAtOnce; ++i) {
            of[i] = of[0];
            of[i].word[1] += 8 * i;
          }
        }
        rounds(of, key);
#pragma unroll
        for (const core::Philox4& x : of)
#pragma unroll
          for (int w = 0; w < 4; ++w) {  // the sign of number - below, at the end
            dropped[w / 2 * 2] = __funnelshift_l((x.word[w] & 0xffffu) - below, dropped[w / 2 * 2], 1);
            dropped[w / 2 * 2 + 1] = __funnelshift_l((x.word[w] >> 16) - below, dropped[w / 2 * 2 + 1], 1);
          }
      }
      const int group = unit % kUnits / 2;
      ptx::mbarrier_wait(barriers.dropped_empty(group), unit / kUnits % 2 ^ 1);
      const unsigned to = words(group) + 16 * own_lane() + (unit % 2 == 0 ? 2u : 0u);
#pragma unroll
      for (unsigned i = 0; i < 4; ++i) ptx::st_shared_2(to + 4 * i, static_cast<unsigned short>(dropped[i]));
      ptx::warp_sync();
      if (own_lane() == 0) ptx::mbarrier_arrive(barriers.dropped_full(group));
    }
  }

  // By the warpgroup of the keys: the thread's word of its `step`th block.
  __device__ __forceinline__ unsigned take(int group, unsigned step) const {
    ptx::mbarrier_wait(barriers.dropped_full(group), step % 2);
    const unsigned lane = own_lane(), warp = own_warp_row() / 16;
    const unsigned word = ptx::ld_shared_4(words(group) + (warp / 2 * 16 + lane / 8 * 4 + lane % 4) * 16 + (warp % 2 * 2 + lane / 4 % 2) * 4);
    ptx::warp_sync();
    if (lane == 0) ptx::mbarrier_arrive(barriers.dropped_empty(group));
    return word;
  }
};

// All ones in the halves of two neighbouring queries' pairs that are dropped: s[2 i] and s[2 i + 1].
__device__ __forceinline__ unsigned dropped_halves(unsigned dropped, int i) {
  unsigned halves;
  const unsigned bits = dropped << (i / 2 % 4 * 2 + i % 2);  // each byte's highest bit, twice:
  if (i < 8)
    asm("prmt.b32 %0, %1, %1, 0xaabb;" : "=r"(halves) : "r"(bits));
  else
    asm("prmt.b32 %0, %1, %1, 0x8899;" : "=r"(halves) : "r"(bits));
  return halves;
}

// P as dv takes it: -0 where it is dropped, which nothing else is.
__device__ __forceinline__ void drop(unsigned (&weights)[4][4], unsigned dropped) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const unsigned halves = dropped_halves(dropped, i);
    unsigned& pair = weights[i / 4][i % 4];
    pair = (pair & ~halves) | (0x80008000u & halves);
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
__device__ __forceinline__ void mark_dropped(float (&p)[32], unsigned dropped) {
#pragma unroll
  for (int i = 0; i < 32; ++i)
    p[i] = __uint_as_float(__float_as_uint(p[i]) | ((dropped << (i / 16 * 16 + i % 2 * 8 + i / 4 % 4 * 2 + i % 4 / 2)) & 0x80000000u));
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
