// A step of the forward pass in fp32 (kernels/v2/forward_f32.h): kStepN keys.
//   S = Q K^T | softcap, terms | kExact: hidden, m raised | P = exp2(S scale - m), split | P beyond its limit: m raised, P again | O += P V
#pragma once

#include "kernels/constants.h"
#include "kernels/mask.h"
#include "kernels/pair.h"
#include "kernels/ptx/warp.h"
#include "kernels/score.h"
#include "kernels/softmax.h"
#include "kernels/tile/split_product.h"
#include "kernels/v2/forward_f32_state.h"

namespace fattn::v2 {

// kGuarded: rows without a reference get weights of 0; otherwise Inf or NaN, which within_limit() sees.
template <class Spec>
template <bool kGuarded>
__device__ __forceinline__ void ForwardF32<Spec>::weigh(Weights& w, const float (&s)[kRowTiles][kStepTiles][4], float scale) const {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float shift = kGuarded && softmax.shift[i][half] == kInfinity ? 0.0f : softmax.shift[i][half];
      // Rounded as the reference was: its own score then has the weight 1, which split products keep whole.
      const auto exponent = [&](float score) { return __fadd_rn(__fmul_rn(score, scale), shift); };
      float sum = 0;
#pragma unroll
      for (int n = 0; n < kStepTiles; ++n) {
        const float x = ptx::ex2(exponent(s[i][n][2 * half])), y = ptx::ex2(exponent(s[i][n][2 * half + 1]));
        sum += x + y;
        if constexpr (own_bits<Spec>())
          split_own(w, x, y, n / 2, i, n % 2 * 2 + half);
        else
          tile::split2(x * kWeightFactor, y * kWeightFactor, w.high[n / 2][i][n % 2 * 2 + half], w.low[n / 2][i][n % 2 * 2 + half]);
      }
      w.sum[i][half] = sum;
    }
  }
}

// False for NaN too.
template <class Spec>
__device__ __forceinline__ bool ForwardF32<Spec>::within_limit(const Weights& w) {
  float all = 0;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) all = fmaxf(all, fmaxf(w.sum[i][0], w.sum[i][1]));
  bool number = true;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) number = number && w.sum[i][0] == w.sum[i][0] && w.sum[i][1] == w.sum[i][1];
  return ptx::vote_all(number && all <= kGreatestWeight);
}

// Scores in units of log2 with their terms. Rows behind the last, and in a block with kExact keys, get what another one has.
template <class Spec>
template <bool kExact>
__device__ __forceinline__ void ForwardF32<Spec>::add_terms(float (&s)[kRowTiles][kStepTiles][4], float scale, const StepPairs& at) const {
  const Terms<kPair, f16> terms(p, at.place.batch, at.place.head, at.seqlen_k);  // no bias is of 16 bits here
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = min(at.row + 16 * i + 8 * half, p.seqlen_q - 1);
#pragma unroll
      for (int n = 0; n < kStepTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int key = at.key + 8 * n + e;
          float& score = s[i][n][2 * half + e];
          score = with_term<kPair.hides()>(score, scale, terms(query, kExact ? min(key, at.seqlen_k - 1) : key));
        }
      }
    }
  }
}

// Drops weights of a step, once their sums are taken. A block of random numbers is several steps.
template <class Spec>
__device__ __forceinline__ void ForwardF32<Spec>::drop(Weights& w, const StepPairs& at) {
  static_assert(core::kDropoutBlock % kStepN == 0);
  const int block = at.key / core::kDropoutBlock, first = at.key % core::kDropoutBlock / 8;
  if (kept_of != block) {
    const Dropout<kPair> dropout(p, at.place.batch, at.place.head);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) kept[i] = dropout.kept_of_rows(at.row + 16 * i, at.key);
    kept_of = block;
  }
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
    const unsigned bits = kept[i] >> first;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < kStepTiles; ++n) {
        const unsigned halves = kept_halves(bits, half, n);
        w.high[n / 2][i][n % 2 * 2 + half] &= halves;
        w.low[n / 2][i][n % 2 * 2 + half] &= halves;
        if constexpr (own_bits<Spec>()) w.low[kChunks + n / 2][i][n % 2 * 2 + half] &= halves;
      }
    }
  }
}

// One step over kStepN keys; which begin at these bytes from the first stage. kExact: mask the scores and find their maximum; otherwise every
// key is visible, and the reference is good unless the sums of the weights say that it is not. `score_scale`: what makes scores of those of the
// split operands, in units of log2, or, kCapped, in those of tanh.
template <class Spec>
template <bool kExact>
__device__ __forceinline__ void ForwardF32<Spec>::step(unsigned k_offset, unsigned v_offset, float score_scale, float value_inverse,
                                                       const Visible& visible, [[maybe_unused]] const StepPairs& at) {
  float s[kRowTiles][kStepTiles][4];
  if constexpr (own_bits<Spec>())
    own_scores(s, k_address + k_offset);
  else
    scores(s, k_address + k_offset);
  float scale = score_scale;
  if constexpr (Spec::kCapped) {
    cap_scores_closely(reinterpret_cast<float(&)[kRowTiles * kStepTiles * 4]>(s), score_scale);
    scale = p.softmax_scale_log2;
  }
  if constexpr (kTerms) {
    add_terms<kExact>(s, scale, at);
    scale = 1;
  }
  if constexpr (kExact) {
    visible.hide(s);
    softmax.template raise<false>(s, 0, kStepTiles, scale, o);
  }
  Weights w;
  weigh<kExact>(w, s, scale);
  if constexpr (!kExact) {
    if (!within_limit(w)) [[unlikely]] {
      softmax.template raise<false>(s, 0, kStepTiles, scale, o);
      weigh<true>(w, s, scale);
    }
  }
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (own_bits<Spec>())
        softmax.sum[i][half] = __fadd_rn(softmax.sum[i][half], w.sum[i][half]);
      else
        softmax.sum[i][half] += w.sum[i][half];
    }
  }
  if constexpr (kPair.dropout) drop(w, at);
  if constexpr (own_bits<Spec>())
    add_own_values(w, v_address + v_offset);
  else
    add_values(w, v_address + v_offset, value_inverse);
}

}  // namespace fattn::v2
