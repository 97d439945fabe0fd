// Dropout in the v3 backward kernel. Random numbers are made beside the warpgroups that compute, by warps of the loader's warpgroup that would be
// idle or, without such a one, of that of dq; they come as one bit a pair through shared memory: a word for each thread and block, of its 32 pairs.
//
// Scores are transposed (v3/backward_fragments.h): a thread wants the bits of two keys and 16 queries, a word of random numbers has those of 16 keys
// and two queries. A lane of the making warp takes all queries of a column pair and the keys of one call; the block's 64 keys and 64 queries are then
// eight words each of 16 lanes, and two lanes make half of them each. They are transposed in bits, without the warps that wait for them.
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
#include "kernels/v3/philox.h"

namespace fattn::v3 {

// Of the thread's pair s[4 i + e] bit kept_bit(i, e), set if the pair stays: its query in the tile of 8 counts 16, its tile among two 8, the two 2,
// its key among the thread's two 1.
constexpr int kept_bit(int i, int e) { return e % 2 * 16 + i % 2 * 8 + i / 2 * 2 + e / 2; }

template <class Spec>
struct KeptBits {
  using Shape = BackwardShape<Spec>;
  const unsigned shared;
  const BackwardBarriers<Spec> barriers;

  __device__ __forceinline__ unsigned words(int group) const { return shared + static_cast<unsigned>(Shape::kOffsetKept + kKeptBytes * group); }

  // Warp 1 of the warpgroup makes the bits of the first 64 keys, the next one those of the next. Found again at each call, as own_lane().
  static __device__ __forceinline__ int maker() { return static_cast<int>(ptx::opaque(threadIdx.x)) / 32 % 4 - 1; }

  // By one warp: the words of all blocks that the keys meet.
  __device__ __forceinline__ void make(const BackwardCall& p, TilePlace tile) const {
    Made made(p, tile);
#pragma unroll 1
    for (int step = 0; step < ptx::uniform(tile.blocks()) * p.call.group; ++step) make_next(p, tile, made, step);
  }

  // Where the warp is in them. Round keys and thresholds stay in uniform registers if all that loops and branches ask is uniform.
  struct Made {
    int row;
    unsigned long long stream;
    __device__ __forceinline__ Made(const BackwardCall& p, TilePlace tile)
        : row(ptx::uniform(tile.first_row())),
          stream(Dropout<kPairOf<Spec>>(p.call, ptx::uniform(tile.batch()), ptx::uniform(tile.head_k()) * p.call.group).stream) {}
  };
  __device__ __forceinline__ void make_next(const BackwardCall& p, TilePlace tile, Made& made, int step) const {
    const HeadOfPhilox head(pairs_of(p.call).dropout_state[0], made.stream);
    // Of the block's queries the lane's 32 upper or lower ones: of query pairs n and n + 1, and those 8 further.
    const int lane = static_cast<int>(own_lane());
    const DropoutPlace<kPairOf<Spec>> place(p.call);
    const unsigned query = core::dropout_query(static_cast<unsigned>(made.row + lane / 16 * 32 + lane % 4 * 2)) + place.queries();
    const unsigned block = static_cast<unsigned>(tile.key() / core::kDropoutBlock + maker()) + place.blocks();
    const unsigned call = block * core::kDropoutCalls + static_cast<unsigned>(lane / 4 % 4);
    unsigned kept[4] = {};
    constexpr int kAtOnce = kPairOf<Spec>.alibi ? 1 : 2;  // more spills there; at once it is 1 to 3 % faster
#pragma unroll kAtOnce
    for (unsigned further = 0; further < 2; ++further) {
      kept[0] = kept[2];
      kept[1] = kept[3];
#pragma unroll
      for (unsigned i = 0; i < 2; ++i) kept[2 + i] = head.kept(query + 8 * further + i, call, pairs_of(p.call).dropout_thresholds);
    }
    transpose(kept, own_lane() / 16);
    ptx::mbarrier_wait(barriers.kept_empty(maker()), step % 2 ^ 1);
    ptx::st_shared_16(words(maker()) + 16 * own_lane(), uint4{kept[0], kept[1], kept[2], kept[3]});
    ptx::warp_sync();
    if (own_lane() == 0) ptx::mbarrier_arrive(barriers.kept_full(maker()));
    made.row += Shape::kBlockM;
    if (made.row >= ptx::uniform(tile.template rows_end<typename Spec::Mask, Shape::kPacked>(p))) {  // of the next query head
      made.row = ptx::uniform(tile.first_row());
      ++made.stream;
    }
  }

  // From words of two query pairs, and of the two 8 further, in the order of core::dropout_bit(), to words of threads: of the even keys of a tile of
  // 16, of its odd ones, and of those of the next tile. `upper`: the lane has the block's last 32 queries, and gets its last 32 keys.
  static __device__ __forceinline__ void transpose(unsigned (&kept)[4], unsigned upper) {
    // Keys' lowest bit, which is bit 4 of a place, against that of queries.
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const unsigned first = kept[i], second = kept[i + 1];
      asm("prmt.b32 %0, %1, %2, 0x5410;" : "=r"(kept[i]) : "r"(first), "r"(second));
      asm("prmt.b32 %0, %1, %2, 0x7632;" : "=r"(kept[i + 1]) : "r"(first), "r"(second));
    }
    // The upper 32 keys, which are bit 2, against the upper queries: between lanes.
    const unsigned own = upper != 0 ? 0xf0f0f0f0u : 0x0f0f0f0fu, turn = upper != 0 ? 28 : 4;
#pragma unroll
    for (unsigned& word : kept) {
      const unsigned other = ptx::shfl_xor(word, 16);
      word = (word & own) | (__funnelshift_l(other, other, turn) & ~own);
    }
    // Tiles of 16 keys, which are bit 1, against those of 16 queries.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned first = kept[i], second = kept[i + 2];
      kept[i] = (first & 0x33333333u) | (second << 2 & 0xccccccccu);
      kept[i + 2] = (first >> 2 & 0x33333333u) | (second & 0xccccccccu);
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

// P as dv takes it: 0 where it is dropped. The sign stays, which tells hidden pairs.
__device__ __forceinline__ void drop(unsigned (&weights)[4][4], const unsigned (&p)[4][4], unsigned kept) {
#pragma unroll
  for (int i = 15; i >= 0; --i) {
    // One shift for two words: bits of neighbouring tiles are a byte apart.
    const int key = i / 2 % 2, tile = i / 4 * 2 + i % 2, at = tile % 2 * 2 + key;
    weights[tile / 2][at] = p[tile / 2][at] & (kept_halves(kept, tile % 2, kept_bit(tile, key * 2) % 8) | 0x80008000u);
  }
}

// ptxas gives the registers of a wgmma's operand away at their last use, even if the wgmma is still under way, and then runs all of them one after
// the other (C7510). This is a use: `never` is false, but only we know that.
__device__ __forceinline__ void hold(const unsigned (&operand)[4][4], bool never, unsigned somewhere) {
  if (never) {
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::st_shared_16(somewhere, uint4{operand[i][0], operand[i][1], operand[i][2], operand[i][3]});
  }
}

// dS in place of P, which is rounded: no registers for what that took away. `dp` is dP less row sums.
template <class Element>
__device__ __forceinline__ void multiply_kept(unsigned (&p)[4][4], unsigned kept, const float (&dp)[32], unsigned row_sums) {
  const unsigned from = row_sums + own_lane() % 4 * 8;
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    const float2 sum = ptx::ld_shared_f32x2(from + static_cast<unsigned>(16 * i));
#pragma unroll
    for (int key = 0; key < 2; ++key) {
      unsigned& pair = p[(i + key) / 4][(i + key) % 4];
      const auto stays = [&](int e) { return (kept & (1u << kept_bit(i / 2, 2 * key + e))) != 0; };
      const float low = stays(0) ? dp[2 * (i + key)] : -sum.x, high = stays(1) ? dp[2 * (i + key) + 1] : -sum.y;
      pair = ptx::pack2<Element>(ptx::low_float<Element>(pair) * low, ptx::high_float<Element>(pair) * high);
    }
  }
}

// By role the sign of P says that the pair is dropped; of a hidden one it is -0 all the same.
__device__ __forceinline__ void mark_dropped(float (&p)[32], unsigned kept) {
#pragma unroll
  for (int i = 0; i < 32; ++i) p[i] = __uint_as_float(__float_as_uint(p[i]) | (~(kept << (31 - kept_bit(i / 4, i % 4))) & 0x80000000u));
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
