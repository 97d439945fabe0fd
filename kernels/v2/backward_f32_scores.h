// P^T of kernels/v2/backward_f32.h, of a chunk of queries, in the registers of a warp, from S^T; and dbias, which is dS. Spec: see there.
#pragma once

#include "device_abi/attention_params.h"
#include "device_abi/lowest.h"
#include "kernels/constants.h"
#include "kernels/pair.h"
#include "kernels/ptx/math.h"
#include "kernels/ptx/reduce.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/shared_pair.h"
#include "kernels/score.h"
#include "kernels/v2/backward_f32_again.h"
#include "kernels/v2/backward_f32_place.h"

namespace fattn::v2 {

template <class Spec>
struct BackwardF32Scores : BackwardF32Place<Spec> {
  using Place = BackwardF32Place<Spec>;
  // clang-format off
  using Place::kWindow, Place::kCapped, Place::kMasked, Place::kPair, Place::kHides, Place::kKeys, Place::kKeyTiles, Place::kChunkTiles, Place::p;
  using Place::this_lane, Place::this_group, Place::batch, Place::first_key, Place::query_inverse, Place::key_inverse, Place::found_params;
  using Place::seqlen_q, Place::seqlen_k, Place::diagonal, Place::left_diagonal;
  // clang-format on
  using Place::Place;

  // What dropout multiplies the weights that stay by, and its inverse.
  __device__ float dropout_scale() const {
    if constexpr (kPair.dropout) return pairs_of(p).dropout_scale;
    return 1.0f;
  }
  __device__ float kept_share() const { return 1.0f - static_cast<float>(pairs_of(p).dropout_below) * (1.0f / 65536); }

  // Zeros in place of the pairs that the mask hides, or that are beyond the last key or query, whatever was computed for them.
  __device__ void hide(float (&x)[kKeyTiles][kChunkTiles][4], int first_query) const {
    const int lane = this_lane(), key = first_key + this_group() * kKeys + lane / 4, query = first_query + lane % 4 * 2;
    const int keys_left = seqlen_k() - key, queries_left = seqlen_q() - query, reach = query + diagonal() - key;
    const int lead = kWindow ? query + left_diagonal() - key : 0;
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
      for (int j = 0; j < kChunkTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int key_step = 16 * i + e / 2 * 8, query_step = 8 * j + e % 2;
          if (key_step >= keys_left || query_step >= queries_left || (kMasked && key_step - query_step > reach) ||
              (kWindow && key_step - query_step < lead))
            x[i][j][e] = 0;
        }
  }

  // NaN in place of the scores of keys that hold Inf: of what these were nothing is left. Rows and keys that see one are computed again.
  __device__ void spoil(float (&s)[kKeyTiles][kChunkTiles][4], unsigned keys) const {
    const unsigned own = keys >> (this_lane() / 4);
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
      for (int j = 0; j < kChunkTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if ((own >> (16 * i + e / 2 * 8) & 1) != 0) s[i][j][e] = kNan;
  }

  // P^T = exp(S^T * scale - lse), in place of S^T.
  __device__ void weights(float (&s)[kKeyTiles][kChunkTiles][4], unsigned lse_at) const {
    const int lane = this_lane();
    const float scale = tile::trusted_or_nan<Spec::kHeaddim>(p.softmax_scale * (key_inverse() * query_inverse), kLog2e);
#pragma unroll
    for (int j = 0; j < kChunkTiles; ++j) {
      const float2 lse = ptx::ld_shared_f32x2(lse_at + 4 * (8 * j + lane % 4 * 2));
      // A row without a gradient: its weights are 0.
      const float reference[2] = {lse.x < kLowestLse ? kInfinity : lse.x, lse.y < kLowestLse ? kInfinity : lse.y};
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][j][e] = ptx::ex2(fmaf(s[i][j][e], scale, -reference[e % 2]) * kLog2e);
    }
  }

  // The same with softcap, terms or dropout: P^T as dV takes it, and `sent`, what the second warp gets.
  __device__ void pair_weights(float (&s)[kKeyTiles][kChunkTiles][4], float (&sent)[kKeyTiles][kChunkTiles][4], unsigned lse_at, int head,
                               int first_query) const {
    const auto& p = found_params();
    const int lane = this_lane(), group_key = first_key + this_group() * kKeys, key = group_key + lane / 4, query = first_query + lane % 4 * 2;
    float scale = tile::trusted_or_nan<Spec::kHeaddim>(p.softmax_scale * (key_inverse() * query_inverse) * kLog2e, 1.0f);
    if constexpr (kCapped) {
      cap_scores_closely(reinterpret_cast<float(&)[kKeyTiles * kChunkTiles * 4]>(s),
                         tile::trusted_or_nan<Spec::kHeaddim>(features_of(p).score_factor * (key_inverse() * query_inverse), p.softmax_scale_log2));
      scale = p.softmax_scale_log2;
    }
    [[maybe_unused]] const Terms<kPair, f16> terms(p, batch, head, seqlen_k());  // no bias is of 16 bits here
    [[maybe_unused]] const Dropout<kPair> dropout(p, batch, head);
    static_assert(core::kDropoutBlock % kKeys == 0);
    [[maybe_unused]] unsigned kept = 0;  // of two tiles of queries
#pragma unroll
    for (int j = 0; j < kChunkTiles; ++j) {
      if constexpr (kPair.dropout)
        if (j % 2 == 0) kept = dropout.kept_transposed(query + 8 * j, group_key / core::kDropoutBlock, lane) >> group_key % core::kDropoutBlock / 8;
      const float2 lse = ptx::ld_shared_f32x2(lse_at + 4 * (8 * j + lane % 4 * 2));
      const float reference[2] = {lse.x < kLowestLse ? kInfinity : lse.x, lse.y < kLowestLse ? kInfinity : lse.y};
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          // Rows and keys behind the last get what another one has, and are hidden later.
          const float term = terms(min(query + 8 * j + e % 2, p.seqlen_q - 1), min(key + 16 * i + e / 2 * 8, seqlen_k() - 1));
          const bool hidden = kHides && term == -kInfinity;
          const float capped = s[i][j][e], weight = hidden ? 0.0f : ptx::ex2(fmaf(capped, scale, fmaf(-reference[e % 2], kLog2e, term)));
          s[i][j][e] = weight;
          sent[i][j][e] = hidden ? -0.0f : kCapped ? weight * fmaf(-capped, capped, 1.0f) : weight;
          if constexpr (kPair.dropout) {
            const bool dropped = (kept >> (j % 2 * 8 + 2 * i + e / 2 + e % 2 * 16) & 1u) == 0;
            if (dropped) s[i][j][e] = 0;
            if (dropped) sent[i][j][e] = -sent[i][j][e];
            if (hidden) sent[i][j][e] = -0.0f;
          }
        }
      }
    }
  }

  // Adds dS, in units of `factor` * `factor2`, to dbias, or writes it, where the pair is seen (masked: where not all are). What is not finite, by
  // IEEE rules: of an Inf in k or v the split operands make NaN.
  __device__ void add_to_dbias(const float (&ds)[kKeyTiles][kChunkTiles][4], int head, int first_query, bool masked, float factor,
                               float factor2) const {
    const auto& p = found_params();
    static_assert(kKeyTiles * kChunkTiles * 4 <= 32);
    const int lane = this_lane(), key = first_key + this_group() * kKeys + lane / 4, query = first_query + lane % 4 * 2;
    const PairParams& pairs = pairs_of(p);
    float* const to = pairs.dbias + batch * pairs.dbias_strides.batch + head * pairs.dbias_strides.head + query * pairs.dbias_strides.row + key;
    const auto add = [&](int key_step, int query_step, float x) {
      if (masked) {
        if (key + key_step >= seqlen_k() || query + query_step >= p.seqlen_q) return;
        if (kMasked && key + key_step > query + query_step + diagonal()) return;
        if (kWindow && key + key_step < query + query_step + left_diagonal()) return;
      }
      if (!is_finite(x)) x = HeadPairs<Spec>(p, batch, head, seqlen_k()).gradient_alone(query + query_step, key + key_step);
      float* const at = to + query_step * pairs.dbias_strides.row + key_step;
      if (pairs.dbias_alone != 0)
        *at = x;
      else
        ptx::red_add(at, x);
    };
    unsigned again = 0;
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
      for (int j = 0; j < kChunkTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float x = ds[i][j][e] * factor * factor2;
          if (is_finite(x))
            add(16 * i + e / 2 * 8, 8 * j + e % 2, x);
          else
            again |= 1u << ((i * kChunkTiles + j) * 4 + e);
        }
#pragma unroll 1
    for (; again != 0; again &= again - 1) {
      const int at = __ffs(static_cast<int>(again)) - 1;
      add(at / (4 * kChunkTiles) * 16 + at % 4 / 2 * 8, at / 4 % kChunkTiles * 8 + at % 2, kInfinity);
    }
  }
};

}  // namespace fattn::v2
