// A mask of pairs and a bias in the v3 backward kernel: each thread reads what belongs to its own pairs of a block while products before it are under
// way. Of a mask that is a word (v3/mask_words.h).
#pragma once

#include "kernels/constants.h"
#include "kernels/ptx/convert.h"
#include "kernels/ptx/math.h"
#include "kernels/ptx/movmatrix.h"
#include "kernels/ptx/reduce.h"
#include "kernels/ptx/shared_pair.h"
#include "kernels/ptx/warp.h"
#include "kernels/v3/backward_fragments.h"
#include "kernels/v3/backward_schedule.h"
#include "kernels/v3/backward_shape.h"
#include "kernels/v3/mask_words.h"

namespace fattn::v3 {

// Without terms: nothing.
template <class Spec, bool kMask>
struct MaskWord {
  template <class Visit>
  __device__ __forceinline__ void for_each_hidden(Visit) const {}
  __device__ __forceinline__ void hide(float (&)[32]) const {}
};

template <class Spec>
struct MaskWord<Spec, true> {
  unsigned word;

  // Of the block of queries from `row` on and the 64 keys from `key` on. Volatile: it stays where it is, ahead of the wait for the scores.
  __device__ __forceinline__ void read(const BackwardCall& p, int batch, int head, int row, int key) {
    const MaskWordsPlace<false> place{pairs_of(p.call)};
    const unsigned* const from = place.words(batch, head, row, min(key, p.call.seqlen_k - 1)) + ptx::opaque(threadIdx.x) % 128;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
  }
  // As hide() and for_each_hidden() of v3/backward_fragments.h.
  template <class Visit>
  __device__ __forceinline__ void for_each_hidden(Visit visit) const {
    if (ptx::vote_all(word == 0xffffffffu)) return;
#pragma unroll
    for (int i = 0; i < 32; ++i)
      if ((word & 1u << i) == 0) visit(i);
  }
  __device__ __forceinline__ void hide(float (&x)[32]) const {
    for_each_hidden([&](int i) { x[i] = kHiddenWeight; });
  }
};

// A bias, of the tensors' dtype (kBias 1) or in fp32 (2). There are few registers for what is read ahead of the scores: the first part of a block.
// Another follows as one is used.
template <class Spec, int kBias>
struct BiasOfPairs {
  static constexpr int kParts = Spec::kByRole ? kBias : kBias == 1 ? 2 : 8, kSteps = 8 / kParts, kBytes = 2 * kBias;
  static constexpr bool kReadsItself = Spec::kByRole || kBias == 2 || BackwardShape<Spec>::kMask;  // of a careful block
  // Of 8 queries: in 16 bits, as they lie side by side, two keys of query lane / 4, for each 8 keys; in fp32 the thread's own pairs.
  unsigned of[kSteps][2 * kBias];

  // Where the thread reads next, 8 queries further with each step.
  struct Place {
    const char* at;
    int rows, rows_further;  // that exist from the thread's first in the block on, if the thread's key does, and the one 8 keys further

    __device__ __forceinline__ static long long row_bytes(const BackwardCall& p) { return pairs_of(p.call).bias_strides.row * kBytes; }
    __device__ __forceinline__ Place(const BackwardCall& p, TilePlace tile, int head, int block_row, int key, int first_step) {
      const PairParams& call = pairs_of(p.call);
      const int lane = static_cast<int>(own_lane()), own_key = key + static_cast<int>(own_warp_row()) + (kBias == 1 ? lane % 4 * 2 : lane / 4);
      const int row = block_row + (kBias == 1 ? lane / 4 : lane % 4 * 2);
      rows = own_key < call.seqlen_k ? call.seqlen_q - row : 0;
      rows_further = own_key + 8 < call.seqlen_k ? call.seqlen_q - row : 0;
      at = static_cast<const char*>(call.bias) +
           (tile.batch() * call.bias_strides.batch + head * call.bias_strides.head + (row + 8 * first_step) * call.bias_strides.row + own_key) *
               kBytes;
    }
    // 0 where there is none, whose pair is hidden later. Volatile: loads stay where they are.
    __device__ __forceinline__ static unsigned load(const char* from, int left, int query) {
      unsigned x;
      asm volatile("{.reg .pred p; setp.gt.s32 p, %2, %3; mov.u32 %0, 0; @p ld.global.u32 %0, [%1];}" : "=r"(x) : "l"(from), "r"(left), "r"(query));
      return x;
    }
    __device__ __forceinline__ void read(unsigned& low, unsigned& high, const char* from, int query) const {
      low = load(from, rows, query);
      high = load(from + 8 * kBytes, rows_further, query);
    }
  };
  __device__ __forceinline__ void read_step(const BackwardCall& p, Place& place, int step) {
    unsigned(&to)[2 * kBias] = of[step % kSteps];
    place.read(to[0], to[kBias], place.at, 8 * step);
    if constexpr (kBias == 2) place.read(to[1], to[3], place.at + Place::row_bytes(p), 8 * step + 1);
    place.at += 8 * Place::row_bytes(p);
  }
  __device__ __forceinline__ void read(const BackwardCall& p, TilePlace tile, int head, int row, int key) {
    Place place(p, tile, head, row, key, 0);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) read_step(p, place, step);
  }

  // s = exp2(s * scale + bias * log2(e) - lse), lse where it is in shared memory. kCareful: kHiddenWeight where the bias hides, whatever
  // the score is.
  template <bool kCareful>
  __device__ __forceinline__ void exponentials(float (&s)[32], unsigned lse, float scale, const BackwardCall& p, TilePlace tile, int head, int row,
                                               int key) {
    const unsigned from = lse + own_lane() % 4 * 8;
    const auto use = [&](int step) {
      const unsigned(&words)[2 * kBias] = of[step % kSteps];
      float bias[4];
      if constexpr (kBias == 1) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const unsigned pair = ptx::transposed(words[half]);
          bias[2 * half] = ptx::low_float<typename Spec::Element>(pair);
          bias[2 * half + 1] = ptx::high_float<typename Spec::Element>(pair);
        }
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) bias[e] = __uint_as_float(words[e]);
      }
      const float2 l = ptx::ld_shared_f32x2(from + static_cast<unsigned>(32 * step));
#pragma unroll
      for (int e = 0; e < 4; ++e) s[4 * step + e] = ptx::ex2(__fmaf_rn(s[4 * step + e], scale, __fmaf_rn(bias[e], kLog2e, e % 2 == 0 ? -l.x : -l.y)));
      if constexpr (kCareful || BackwardShape<Spec>::kDbias ||
                    (Spec::kByRole && kBias == 2)) {  // the latter for ptxas, which spilled 4 bytes without
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (bias[e] == -kInfinity) s[4 * step + e] = kHiddenWeight;
      }
    };
    if constexpr (kCareful && kReadsItself) {  // nothing was read ahead: no registers for it
      Place place(p, tile, head, row, key, 0);
#pragma unroll
      for (int step = 0; step < 8; ++step) {
        read_step(p, place, step);
        use(step);
        if constexpr (Spec::kByRole)
          ptx::warp_sync();
        else
          place.at += s[4 * step] == -1.0f ? 1 : 0;  // never: no weight is. But ptxas does not read all steps first.
      }
    } else if constexpr (kParts == 1) {
#pragma unroll
      for (int step = 0; step < 8; ++step) use(step);
    } else {
      Place place(p, tile, head, row, key, kSteps);
#pragma unroll
      for (int step = 0; step < 8; ++step) {
        use(step);
        if (step + kSteps < 8) read_step(p, place, step + kSteps);
      }
    }
  }
};

// The weights of pairs that a bias of -inf hides, whatever was computed for them: read again, pair by pair. Seldom used, so small.
template <class Spec>
__device__ __forceinline__ void hide_infinite_biases(float (&s)[32], const BackwardCall& p, TilePlace tile, int head, int block_row, int key) {
  const PairParams& call = pairs_of(p.call);
  const int lane = static_cast<int>(own_lane()), own_key = key + static_cast<int>(own_warp_row()) + lane / 4, row = block_row + lane % 4 * 2;
  const long long first = tile.batch() * call.bias_strides.batch + head * call.bias_strides.head + own_key;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int query = row + i / 4 * 8 + i % 2, further = i % 4 / 2 * 8;
    if (query >= call.seqlen_q || own_key + further >= call.seqlen_k) continue;
    const long long at = first + query * call.bias_strides.row + further;
    float bias;
    if constexpr (BackwardShape<Spec>::kBias == 2)
      bias = static_cast<const float*>(call.bias)[at];
    else
      bias = ptx::to_float<typename Spec::Element>(static_cast<const unsigned short*>(call.bias)[at]);
    if (bias == -kInfinity) s[i] = kHiddenWeight;
  }
}

// dS of a block in fp32 to dbias, or added to it where that is of several pairs.
template <class Spec>
__device__ __forceinline__ void write_dbias(const float (&ds)[32], const BackwardCall& p, TilePlace tile, int head, int block_row, int key) {
  const PairParams& call = pairs_of(p.call);
  const int lane = static_cast<int>(own_lane()), own_key = key + static_cast<int>(own_warp_row()) + lane / 4, row = block_row + lane % 4 * 2;
  const int rows = own_key < call.seqlen_k ? call.seqlen_q - row : 0, rows_further = own_key + 8 < call.seqlen_k ? call.seqlen_q - row : 0;
  float* at = call.dbias + tile.batch() * call.dbias_strides.batch + head * call.dbias_strides.head + row * call.dbias_strides.row + own_key;
  const auto for_each = [&](auto put) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float* const to = at + e * call.dbias_strides.row;
        if (8 * i + e < rows) put(to, ds[4 * i + e]);
        if (8 * i + e < rows_further) put(to + 8, ds[4 * i + 2 + e]);
      }
      at += 8 * call.dbias_strides.row;
    }
  };
  if (call.dbias_alone != 0)
    for_each([](float* to, float x) { *to = x; });
  else
    for_each([](float* to, float x) { ptx::red_add(to, x); });
}

template <class Spec>
struct BiasOfPairs<Spec, 0> {
  static constexpr bool kReadsItself = true;
};

}  // namespace fattn::v3
