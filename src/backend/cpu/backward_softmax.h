// P = exp(S - lse) and dS = P * (dP - delta) of a block of keys (backward.h), as the options of scores want them.
#pragma once

#include "backend/cpu/backward_scratch.h"

namespace fattn::core::FATTN_ISA {

// The keys that lane i of a tile sees of a block: [first_seen + i, first_hidden + i); keys [whole_begin, whole_end) are seen by all lanes.
struct BlockMask {
  int64_t first_seen, first_hidden, whole_begin, whole_end;
};

// Of a block of `keys` keys, those that one of the lanes [lane, lane + lanes) sees; from an even one on where keys come in pairs.
template <class Ops>
FATTN_INLINE KeyRange keys_of_lanes(const BlockMask& mask, int64_t keys, int64_t lane, int64_t lanes) {
  const int64_t begin = mask.first_seen + lane, end = mask.first_hidden + lane + lanes - 1;
  const int64_t from = begin < 0 ? 0 : begin / Ops::kPair * Ops::kPair;
  return {from, end < keys ? end : keys};
}

// What stays of vector w at `key`. (An edge that hides nothing there may be too far off for an int.)
FATTN_INLINE F32 keep_visible(const BlockMask& mask, F32 x, int64_t key, int w) {
  if (key >= mask.whole_end) x = keep_from(x, static_cast<int>(key - mask.first_hidden + 1 - w * kLanes), zero());
  if (key < mask.whole_begin) x = keep_below(x, static_cast<int>(key - mask.first_seen + 1 - w * kLanes), zero());
  return x;
}

// The gradient of a pair's score, given p and dP, and p as dV's product takes it. Without inputs:
struct PlainGradient {};
FATTN_INLINE F32 addend(const PlainGradient&, F32 minus_lse, int64_t) { return minus_lse; }
FATTN_INLINE F32 gradient_of(const PlainGradient&, F32& p, F32 dp, F32 delta, int64_t, int64_t) { return mul(p, sub(dp, delta)); }
FATTN_INLINE void hide(const PlainGradient&, F32, F32&, F32&, int64_t) {}
FATTN_INLINE void keep_gradient(const PlainGradient&, F32, F32, const BlockMask&, int64_t, int, int64_t) {}

// With pairs that are hidden: by a score of -Inf, or kTerms, by a term of -Inf (what is added to capped scores is apart from them, since their
// gradient needs both). kDrops: with dropout. kKeeps: the gradient by the score is wanted, too.
template <bool kTerms, bool kDrops, bool kKeeps>
struct InputGradient {
  const float* terms;
  const uint32_t* words;
  int64_t key0;  // of the block
  float* score_gradient;
  F32 scale;   // of the weights that stay
  F32 hidden;  // -Inf, or NaN if hidden pairs are looked for afterwards
};
template <bool kTerms, bool kDrops, bool kKeeps>
FATTN_INLINE F32 addend(const InputGradient<kTerms, kDrops, kKeeps>& in, F32 minus_lse, int64_t at) {
  if constexpr (kTerms) return add(load(in.terms + at), minus_lse);
  return minus_lse;
}
template <bool kTerms, bool kDrops, bool kKeeps>
FATTN_INLINE F32 gradient_of(const InputGradient<kTerms, kDrops, kKeeps>& in, F32& p, F32 dp, F32 delta, int64_t key, int64_t at) {
  if constexpr (!kDrops) return mul(p, sub(dp, delta));
  const U32 word = load_u32(in.words + dropout_word(in.key0, in.key0 + key) * kTile + at % kTile);
  const U32 bit = set1_u32(1u << dropout_bit_of_row(in.key0 + key));
  const F32 gradient = mul(p, sub(keep_if(mul(dp, in.scale), word, bit), delta));
  p = keep_if(p, word, bit);  // dv gets the scale when it is whole: rounded to 16 bits it would be off by as much in every weight
  return gradient;
}
template <bool kTerms, bool kDrops, bool kKeeps>
FATTN_INLINE void hide(const InputGradient<kTerms, kDrops, kKeeps>& in, F32 t, F32& p, F32& gradient, int64_t at) {
  const F32 tested = kTerms ? load(in.terms + at) : t;
  p = where_equal(tested, in.hidden, zero(), p);
  gradient = where_equal(tested, in.hidden, zero(), gradient);
}
template <bool kTerms, bool kDrops, bool kKeeps>
FATTN_INLINE void keep_gradient(const InputGradient<kTerms, kDrops, kKeeps>& in, F32 t, F32 gradient, const BlockMask& mask, int64_t key, int w,
                                int64_t at) {
  if constexpr (!kKeeps) return;
  gradient = where_equal(kTerms ? load(in.terms + at) : t, in.hidden, zero(), gradient);
  if (key < mask.whole_begin || key >= mask.whole_end) gradient = keep_visible(mask, gradient, key, w);
  store(in.score_gradient + at, gradient);
}

// P = exp(score - lse) and dS of a block from S^T and dP^T, in the layouts that the products want. The difference is taken
// before it goes to base 2: its rounding errors are relative to itself.
template <class Score, class Inputs>
FATTN_INLINE void softmax_gradient(OpsF32, const Score& score, const Inputs& inputs, float* s, float* ds, float*, float*, float*, int64_t keys,
                                   const BlockMask& mask, const float* lse, const float* delta) {
  F32 l[kTileVecs], d[kTileVecs];
  const F32 log2e = set1(kLog2E);
  for (int w = 0; w < kTileVecs; ++w) {
    l[w] = sub(zero(), load(lse + w * kLanes));
    d[w] = load(delta + w * kLanes);
  }
  for (int64_t key = 0; key < keys; ++key) {
    const bool masked = key < mask.whole_begin || key >= mask.whole_end;
    FATTN_UNROLL
    for (int w = 0; w < kTileVecs; ++w) {
      const int64_t at = key * kTile + w * kLanes;
      const F32 t = shaped(score, load(s + at));
      F32 p = exp2_weight(mul(plus(score, t, addend(inputs, l[w], at)), log2e));
      const F32 of_score = gradient_of(inputs, p, load(ds + at), d[w], key, at);
      keep_gradient(inputs, t, of_score, mask, key, w, at);
      F32 g = through(score, t, of_score);
      hide(inputs, t, p, g, at);
      if (masked) {
        p = keep_visible(mask, p, key, w);
        g = keep_visible(mask, g, key, w);
      }
      store(s + at, p);
      store(ds + at, g);
    }
  }
}
#ifdef FATTN_DOT
template <class Score, class Inputs>
FATTN_INLINE void softmax_gradient(OpsDot, const Score& score, const Inputs& inputs, float* s, float* ds, uint32_t* p_rows, uint32_t* ds_rows,
                                   uint32_t* ds_columns, int64_t keys, const BlockMask& mask, const float* lse, const float* delta) {
  F32 l[kTileVecs], d[kTileVecs];
  const F32 log2e = set1(kLog2E);
  for (int w = 0; w < kTileVecs; ++w) {
    l[w] = sub(zero(), load(lse + w * kLanes));
    d[w] = load(delta + w * kLanes);
  }
  bf16* p_out = reinterpret_cast<bf16*>(p_rows);
  bf16* ds_out = reinterpret_cast<bf16*>(ds_rows);
  for (int64_t key = 0; key < keys; key += 2) {
    FATTN_UNROLL
    for (int w = 0; w < kTileVecs; ++w) {
      F32 p[2], g[2];
      for (int j = 0; j < 2; ++j) {
        if (key + j >= keys) {
          p[j] = g[j] = zero();
          continue;
        }
        const int64_t at = (key + j) * kTile + w * kLanes;
        const F32 t = shaped(score, load(s + at));
        p[j] = exp2_coarse(mul(plus(score, t, addend(inputs, l[w], at)), log2e));
        const F32 of_score = gradient_of(inputs, p[j], load(ds + at), d[w], key + j, at);
        keep_gradient(inputs, t, of_score, mask, key + j, w, at);
        g[j] = through(score, t, of_score);
        hide(inputs, t, p[j], g[j], at);
        if (key + j < mask.whole_begin || key + j >= mask.whole_end) {
          p[j] = keep_visible(mask, p[j], key + j, w);
          g[j] = keep_visible(mask, g[j], key + j, w);
        }
        store_rounded(p_out + at, p[j]);
        store_rounded(ds_out + at, g[j]);
      }
      store_pairs(ds_columns + key / 2 * kTile + w * kLanes, make_pairs(g[0], g[1]));
    }
  }
}
#endif

// What there is in a block beside products: pairs hidden by more than the mask's geometry, terms apart from the scores, a wish for the gradient of
// the scores, pairs to be looked at one by one afterwards.
struct BlockKinds {
  bool hidden, terms, keeps, element_wise;
};

// softmax_gradient of a block as the task's options want it. On its own, since it is the same for every dtype of the inputs.
template <class Ops>
__attribute__((noinline)) void gradients_of_block(const BackwardTask& task, const BlockScratch<Ops>& block, BlockKinds kinds, int64_t key0,
                                                  int64_t keys, const BlockMask& mask, const float* lse, const float* delta) {
  const ScoreInputs& in = task.inputs;
  const double magnitude = Scale(task.scale).magnitude;
  const bool drops = in.dropout_below > 0;
  const auto gradient_with = [&](const auto& score, const auto& with) {
    softmax_gradient(Ops{}, score, with, block.s, block.ds, block.p_rows, block.ds_rows, block.ds_columns, keys, mask, lse, delta);
  };
  const auto gradient_of_inputs = [&](const auto& score, auto has_terms, auto has_dropout, auto has_gradient) {
    gradient_with(score, InputGradient<has_terms.value, has_dropout.value, has_gradient.value>{
                             block.terms, block.words, key0, block.score_gradient, set1(in.dropout_scale),
                             set1(kinds.element_wise ? __builtin_nanf("") : minus_infinity())});
  };
  const auto softmax_gradient_of = [&](const auto& score, auto has_terms) {
    if (!kinds.hidden && !kinds.terms && !drops && !kinds.keeps) return gradient_with(score, PlainGradient{});
    if (drops && kinds.keeps) return gradient_of_inputs(score, has_terms, Flag<true>{}, Flag<true>{});
    if (drops) return gradient_of_inputs(score, has_terms, Flag<true>{}, Flag<false>{});
    if (kinds.keeps) return gradient_of_inputs(score, has_terms, Flag<false>{}, Flag<true>{});
    gradient_of_inputs(score, has_terms, Flag<false>{}, Flag<false>{});
  };
  if (!(task.softcap > 0))
    softmax_gradient_of(ScaledScore(adds(in) ? 1.0 : magnitude), Flag<false>{});
  else if (kinds.terms)
    softmax_gradient_of(CappedScore(magnitude, task.softcap), Flag<true>{});
  else
    softmax_gradient_of(CappedScore(magnitude, task.softcap), Flag<false>{});
}

}  // namespace fattn::core::FATTN_ISA
