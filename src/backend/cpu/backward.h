// Backward pass of the CPU backend (FlashAttention-2, algorithm 2, with K/V blocks outside): a task owns a range of keys
// and their dK and dV, walks over all tiles of query rows that see them, the last one first, and adds its part of dQ.
//   P = exp(S - lse)   dV += P^T dO   dP = dO V^T   dS = P * (dP - delta)   dQ += scale dS K   dK += scale dS^T Q
#pragma once

#include "backend/cpu/bias_gradient.h"
#include "backend/cpu/dq_order.h"
#include "backend/cpu/dq_sums.h"
#include "backend/cpu/dropout_words.h"
#include "device_abi/lowest.h"

namespace fattn::core::FATTN_ISA {

// A block of scores and what becomes of them.
template <class Ops>
struct BlockScratch {
  using Element = typename Ops::Element;
  float *s, *ds;                  // [block_k][kTile]; P and dS replace S^T and dP^T
  Element *p_rows, *ds_rows;      // bf16 products: P^T and dS^T with pairs along the queries
  Element* ds_columns;            // bf16 products: dS^T with pairs along the keys
  float *terms, *score_gradient;  // [block_k][kTile]: what is added to capped scores; the gradient of that, where dS is not it
  uint32_t* words;                // which pairs a mask shows, then which weights stay
};

template <class T, class Ops>
struct BackwardScratch : BlockScratch<Ops> {
  using Element = typename Ops::Element;
  using Block = BlockScratch<Ops>;
  using Block::s, Block::ds, Block::p_rows, Block::ds_rows, Block::ds_columns, Block::terms, Block::score_gradient, Block::words;
  Element *k_rows, *v_rows, *k_columns;  // K and V of the task's keys, where they need a buffer
  float *dk, *dv;                        // [task_k][headdim rounded up]
  Element *q_lanes, *dout_lanes;         // [elements(headdim)][kTile], by lane_offset: operands of S^T and dP^T
  Element *q_columns, *dout_columns;     // [elements(kTile)][copy_stride(headdim)]: operands of dK and dV
  float* dq;                             // [headdim][kTile], by lane_offset
  // Where an operand holds an Inf or NaN at a pair that does not count, its two parts (nonfinite.h): rows as T, and as what they stand for.
  T *finite_rows, *code_rows;
  Element *q_finite, *q_codes, *dout_finite, *dout_codes, *k_finite, *k_codes;
  Element *kinds_rows, *kinds_columns;  // as p_rows and ds_columns
  float *hidden, *sums;                 // [block_k][kTile]: -Inf where a pair does not count; of codes

  size_t lay_out(char* base, int64_t task_k, int64_t block_k, int headdim, int headdim_v, bool inputs) {
    Scratch a{base};
    const int64_t width = round_up(headdim, kLanes), width_v = round_up(headdim_v, kLanes);
    k_rows = a.take<Element>(Operand<T, Ops>::row_buffer(task_k, headdim));
    v_rows = a.take<Element>(Operand<T, Ops>::row_buffer(task_k, headdim_v));
    k_columns = a.take<Element>(Ops::kPair == 1 ? 0 : Operand<T, Ops>::column_buffer(task_k, headdim));  // fp32: as k_rows
    dk = a.take<float>(task_k * width);
    dv = a.take<float>(task_k * width_v);
    q_lanes = a.take<Element>(elements<Ops>(headdim) * kTile);
    dout_lanes = a.take<Element>(elements<Ops>(headdim_v) * kTile);
    q_columns = a.take<Element>(elements<Ops>(kTile) * copy_stride(headdim));
    dout_columns = a.take<Element>(elements<Ops>(kTile) * copy_stride(headdim_v));
    dq = a.take<float>(static_cast<int64_t>(headdim) * kTile);
    const int64_t wide = headdim > headdim_v ? headdim : headdim_v, long_side = block_k > kTile ? block_k : kTile;
    finite_rows = a.take<T>(long_side * wide);
    code_rows = a.take<T>(long_side * wide);
    q_finite = a.take<Element>(elements<Ops>(kTile) * copy_stride(headdim));
    q_codes = a.take<Element>(elements<Ops>(kTile) * copy_stride(headdim));
    dout_finite = a.take<Element>(elements<Ops>(kTile) * copy_stride(headdim_v));
    dout_codes = a.take<Element>(elements<Ops>(kTile) * copy_stride(headdim_v));
    k_finite = a.take<Element>(elements<Ops>(block_k) * copy_stride(headdim));
    k_codes = a.take<Element>(elements<Ops>(block_k) * copy_stride(headdim));
    kinds_rows = a.take<Element>(block_k * elements<Ops>(kTile));
    kinds_columns = a.take<Element>(Ops::kPair == 1 ? 0 : elements<Ops>(block_k) * kTile);
    if (Ops::kPair == 1) kinds_columns = kinds_rows;
    hidden = a.take<float>(block_k * kTile);
    sums = a.take<float>(long_side * round_up(wide, kLanes));
    s = a.take<float>(block_k * kTile);
    ds = a.take<float>(block_k * kTile);
    if constexpr (Ops::kPair == 1) {
      p_rows = s;
      ds_rows = ds_columns = ds;
    } else {
      p_rows = a.take<Element>(block_k * elements<Ops>(kTile));
      ds_rows = a.take<Element>(block_k * elements<Ops>(kTile));
      ds_columns = a.take<Element>(elements<Ops>(block_k) * kTile);
    }
    const int64_t tile = inputs ? block_k * kTile : 0;
    terms = a.take<float>(tile);
    score_gradient = a.take<float>(tile);
    words = a.take<uint32_t>(inputs ? dropout_rows(block_k) * kTile : 0);
    return a.used;
  }
};

// Row-major tile of query rows as the vector operand of a product along the queries; rows beyond `rows` are 0.
template <class T>
FATTN_INLINE void pack_columns(OpsF32, const T* from, int64_t stride, int64_t rows, int64_t n, float* to) {
  const int64_t width = copy_stride(n);
  copy_rows(from, stride, rows, n, to, width);
  for (int64_t i = rows * width; i < kTile * width; i += kLanes) store(to + i, zero());
}
#ifdef FATTN_DOT
FATTN_INLINE void pack_columns(OpsDot, const bf16* from, int64_t stride, int64_t rows, int64_t n, uint32_t* to) {
  const int64_t width = copy_stride(n);
  Operand<bf16, OpsDot>::column_scalars(from, stride, rows, n, to);
  for (int64_t i = elements<OpsDot>(rows) * width; i < elements<OpsDot>(kTile) * width; ++i) to[i] = 0;
}
#endif

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
  p = keep_if(mul(p, in.scale), word, bit);
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

// Of lse in a tile, where rows without a gradient and lanes beyond the tensor have +inf, so that P is 0.
FATTN_INLINE bool has_gradient(float lse) { return lse != __builtin_inff(); }

// -Inf for the pairs of a block that do not count: hidden by what there is, or of rows without a gradient.
template <class T, class Ops>
__attribute__((noinline)) void find_hidden(const ScoreInputs& in, BackwardScratch<T, Ops>& scratch, const BlockMask& mask, const float* lse,
                                           int64_t head, const TilePlace& at) {
  F32 unused[kTileVecs];
  for (int w = 0; w < kTileVecs; ++w) unused[w] = zero();
  for (int64_t i = 0; i < at.keys * kTile; i += kLanes) store(scratch.hidden + i, zero());
  if (in.bias) add_terms<kTileVecs, T>(in, head, at, 1.0f, scratch.hidden, unused);
  if (in.mask && make_mask_words<kTileVecs>(in, head, at, scratch.words) != Seen::kAll)
    hide_masked<kTileVecs>(scratch.words, at.keys, scratch.hidden, unused);
  if (in.document_q) hide_documents<kTileVecs>(in, at, scratch.hidden, unused);
  if (mask.whole_begin > 0 || mask.whole_end < at.keys)
    hide_scores<kTileVecs>(scratch.hidden, 0, at.keys, mask.first_seen, mask.first_hidden, unused);
  for (int64_t i = 0; i < kTile; ++i)
    for (int64_t key = 0; !has_gradient(lse[i]) && key < at.keys; ++key) scratch.hidden[key * kTile + i] = minus_infinity();
}

template <class T, class Ops>
void backward_task(const BackwardTask& task) {
  BackwardScratch<T, Ops> scratch;
  const int64_t task_keys = task.key_end - task.key_begin;
  scratch.lay_out(static_cast<char*>(task.scratch), task_keys, task.block_k, task.headdim, task.headdim_v,
                  !is_plain(task.inputs) || task.has_dbias || task.inputs.document_q);
  const int64_t width = round_up(task.headdim, kLanes), width_v = round_up(task.headdim_v, kLanes);
  for (int64_t i = 0; i < task_keys * width; i += kLanes) store(scratch.dk + i, zero());
  for (int64_t i = 0; i < task_keys * width_v; i += kLanes) store(scratch.dv + i, zero());

  const Scale scaling(task.scale);

  const T* k = static_cast<const T*>(task.k) + task.key_begin * task.k_stride;
  const T* v = static_cast<const T*>(task.v) + task.key_begin * task.v_stride;
  const Scalars k_rows = Operand<T, Ops>::row_scalars(k, task.k_stride, task_keys, task.headdim, scratch.k_rows);
  const Scalars v_rows = Operand<T, Ops>::row_scalars(v, task.v_stride, task_keys, task.headdim_v, scratch.v_rows);
  Scalars k_columns = k_rows;
  if constexpr (Ops::kPair == 2) k_columns = Operand<T, Ops>::column_scalars(k, task.k_stride, task_keys, task.headdim, scratch.k_columns);

  const ScoreInputs& in = task.inputs;
  const bool capped = task.softcap > 0, added = adds(in), drops = in.dropout_below > 0, one_row_mask = in.mask && in.mask_stride == 0;
  // dS is by the product q k; that is the gradient of a bias where scores are not capped and dS is kept in fp32.
  const bool keeps = task.has_dbias && (capped || Ops::kPair == 2);
  const float* const bias_gradient = keeps ? scratch.score_gradient : scratch.ds;
  const int32_t *row_ids = task.inputs.document_q, *key_ids = task.inputs.document_k;
  const IdRange task_ids = row_ids ? ids_of(key_ids, task.key_begin, task.key_end) : IdRange{};
  const int64_t unit = task.inputs.dropout_below > 0 ? kDropoutBlock : Ops::kPair;  // counted from task.key_begin

  // Is there an Inf or NaN among the keys? Of all of the task's, looked for when it is first asked, or of some.
  int task_nonfinite = -1;
  const auto keys_nonfinite = [&](int64_t begin, int64_t keys) {
    if (task_nonfinite < 0) task_nonfinite = any_nonfinite(k, task.k_stride, task_keys, task.headdim);
    return task_nonfinite > 0 && any_nonfinite(k + begin * task.k_stride, task.k_stride, keys, task.headdim);
  };

  F32 one[kTileVecs], unused[kTileVecs];
  for (int w = 0; w < kTileVecs; ++w) one[w] = unused[w] = set1(1.0f);

  // The rows that see a key of this task.
  const int64_t first_row = task.key_begin - task.diagonal + 1, row_end = task.key_end - task.left_diagonal;
  const int64_t begin = first_row > 0 ? first_row / kTile * kTile : 0, end = row_end < task.seqlen_q ? row_end : task.seqlen_q;
  for (int64_t head = 0; task.has_dbias && head < task.group; ++head) {  // of rows that see none
    const BiasGradient<T> dbias = bias_gradient_of<T>(task, head);
    dbias.pass_over(0, begin < task.seqlen_q ? begin : task.seqlen_q, task.key_begin, task.key_end);
    dbias.pass_over(begin < end ? end : begin, task.seqlen_q, task.key_begin, task.key_end);
  }
  for (int64_t tile_end = end, row0; tile_end > begin; tile_end = row0) {
    const int64_t left = tile_end - begin;
    row0 = row_ids ? tile_end - rows_of_one(row_ids + tile_end, left < kTile ? left : kTile) : begin + (left - 1) / kTile * kTile;
    const int64_t rows = tile_end - row0;
    const IdRange ids = row_ids ? ids_of(row_ids, row0, tile_end) : IdRange{};
    for (int64_t head = 0; head < task.group; ++head) {
      say_begun(task, row0, tile_end, head);
      const BiasGradient<T> dbias = bias_gradient_of<T>(task, head);
      const auto pass_over = [&](int64_t from_key, int64_t to_key) {
        if (task.has_dbias) dbias.pass_over(row0, tile_end, task.key_begin + from_key, task.key_begin + to_key);
      };
      if (row_ids && !may_meet(ids, task_ids)) {
        pass_over(0, task_keys);
        continue;
      }
      const int vecs = static_cast<int>((rows + kLanes - 1) / kLanes);  // of the tile's that have rows
      const T* q = static_cast<const T*>(task.q) + head * task.q_head_stride + row0 * task.q_stride;
      const T* dout = static_cast<const T*>(task.dout) + head * task.dout_head_stride + row0 * task.dout_stride;
      pack_lanes(Ops{}, q, task.q_stride, rows, task.headdim, scaling.sign, scratch.q_lanes);
      pack_lanes(Ops{}, dout, task.dout_stride, rows, task.headdim_v, 1.0f, scratch.dout_lanes);
      pack_columns(Ops{}, q, task.q_stride, rows, task.headdim, scratch.q_columns);
      pack_columns(Ops{}, dout, task.dout_stride, rows, task.headdim_v, scratch.dout_columns);
      for (int64_t i = 0; i < static_cast<int64_t>(task.headdim) * kTile; i += kLanes) store(scratch.dq + i, zero());
      float lse[kTile], delta[kTile];
      bool some_without = false;  // a gradient
      for (int64_t i = 0; i < kTile; ++i) {
        const float l = i < rows ? task.lse[head * task.lse_head_stride + (row0 + i) * task.lse_stride] : minus_infinity();
        lse[i] = l < kLowestLse ? __builtin_inff() : l;
        delta[i] = i < rows ? task.delta[head * task.delta_head_stride + (row0 + i) * task.delta_stride] : 0.0f;
        some_without = some_without || (i < rows && !has_gradient(lse[i]));
      }

      int q_nonfinite = -1, dout_nonfinite = -1;
      const auto rows_nonfinite = [&] {
        if (q_nonfinite < 0) {
          q_nonfinite = any_nonfinite(q, task.q_stride, rows, task.headdim);
          dout_nonfinite = any_nonfinite(dout, task.dout_stride, rows, task.headdim_v);
        }
        return q_nonfinite > 0 || dout_nonfinite > 0;
      };
      using Element = typename Ops::Element;
      bool rows_split = false;
      const auto split_rows = [&] {
        const auto split = [&](const T* from, int64_t stride, int64_t n, bool all_nan, Element* finite, Element* codes)
            __attribute__((always_inline)) {
          split_nonfinite(from, stride, rows, n, all_nan, scratch.finite_rows, scratch.code_rows);
          pack_columns(Ops{}, scratch.finite_rows, n, rows, n, finite);
          pack_columns(Ops{}, scratch.code_rows, n, rows, n, codes);
        };
        // With an Inf in q, or in k, dS is 0 or NaN.
        if (q_nonfinite) split(q, task.q_stride, task.headdim, true, scratch.q_finite, scratch.q_codes);
        if (dout_nonfinite) split(dout, task.dout_stride, task.headdim_v, false, scratch.dout_finite, scratch.dout_codes);
        rows_split = true;
      };
      const int64_t last_seen = row0 + rows - 1 + task.diagonal - task.key_begin;
      const int64_t keys_seen = last_seen < task_keys ? last_seen : task_keys;
      const int64_t unseen = row0 + task.left_diagonal - task.key_begin;
      KeyRange some{unseen > 0 ? unseen : 0, keys_seen};
      if (row_ids) some = keys_of(ids, key_ids + task.key_begin, some.begin, some.end);
      NextRows next_q, next_dout, next_dq, next_dq_low;
      int64_t fetched = 0;  // rows a panel
      const bool next_head = head + 1 < task.group;
      if (kFetchesAhead && (next_head || row0 > begin) && some.begin < some.end) {
        const int64_t to_next = next_head ? 0 : row0 - begin < kTile ? row0 - begin : kTile;  // rows before
        const int64_t next = next_head ? rows : to_next, heads = next_head ? 1 : -head;
        const int64_t blocks = (some.end - some.begin + task.block_k - 1) / task.block_k;
        next_q = NextRows(q + heads * task.q_head_stride - to_next * task.q_stride, task.q_stride, next, task.headdim);
        next_dout = NextRows(dout + heads * task.dout_head_stride - to_next * task.dout_stride, task.dout_stride, next, task.headdim_v);
        const DqRows<T> dq(task, head + heads, row0 - to_next);
        next_dq = dq.next(next, task.headdim);
        next_dq_low = dq.next_low(next, task.headdim);
        fetched = (kTile + kPanelsOfTile * blocks - 1) / (kPanelsOfTile * blocks);
      }
      int64_t dbias_end = 0;  // up to this key of the task dbias has all it gets
      for (int64_t key0 = some.begin / unit * unit; key0 < some.end; key0 += task.block_k) {
        const int64_t keys = some.end - key0 < task.block_k ? some.end - key0 : task.block_k;
        const int64_t first = task.key_begin + key0;
        const IdRange block_ids = row_ids ? ids_of(key_ids, first, first + keys) : IdRange{};
        if (row_ids && !may_meet(ids, block_ids)) continue;
        const bool mixed = row_ids && !are_one(ids, block_ids);
        const auto in_block = [&](int64_t key) { return key < 0 ? 0 : key < keys ? key : keys; };
        const int64_t first_seen = unseen - key0, first_hidden = row0 + task.diagonal - task.key_begin - key0;
        const BlockMask mask{first_seen, first_hidden, in_block(first_seen + rows - 1), in_block(first_hidden)};
        const TilePlace at{row0, rows, first, keys};
        Seen visible = one_row_mask ? make_mask_words<kTileVecs>(in, head, at, scratch.words) : Seen::kAll;
        if (visible == Seen::kNone) continue;
        // At an edge of the mask each half of the rows has products of its own, of the keys that it sees; what is left of s and ds is hidden later.
        const bool at_edge = mask.whole_begin > 0 || mask.whole_end < keys;
        const auto keys_seen_by = [&](int64_t lane, int64_t lanes) {
          return at_edge ? keys_of_lanes<Ops>(mask, keys, lane, lanes) : KeyRange{0, keys};
        };
        const auto for_parts = [&](const auto& body) {
          if (kPanelVecs < 4 || !at_edge) return for_panels(0, vecs, body);
          int w = 0;
          for (; w + 2 <= vecs; w += 2) body(w, Count<2>{});
          if (w < vecs) body(w, Count<1>{});
        };
        const auto products_of = [&](int64_t part_begin, int64_t part_end) {
          for_parts([&](int w, auto count) {
            constexpr int kVecs = decltype(count)::value;
            const KeyRange seen = keys_seen_by(w * kLanes, kVecs * kLanes);
            const int64_t first_key = seen.begin > part_begin ? seen.begin : part_begin, end_key = seen.end < part_end ? seen.end : part_end;
            if (first_key >= end_key) return;
            const auto from = [&](Scalars a) { return Scalars{a.data + (key0 + first_key) * a.stride, a.stride}; };
            float *s = scratch.s + first_key * kTile, *ds = scratch.ds + first_key * kTile;
            if constexpr (kFetchesAhead) {
              next_q.fetch(fetched);
              next_dq.fetch(fetched);
              next_dq_low.fetch(fetched);
              next_dout.fetch(fetched);
            }
            product_by_row<Ops, kVecs>(from(k_rows), end_key - first_key, scratch.q_lanes + lane_offset(elements<Ops>(task.headdim), w * kLanes),
                                       elements<Ops>(task.headdim), s + w * kLanes, kTile, unused);
            product_by_row<Ops, kVecs>(from(v_rows), end_key - first_key, scratch.dout_lanes + lane_offset(elements<Ops>(task.headdim_v), w * kLanes),
                                       elements<Ops>(task.headdim_v), ds + w * kLanes, kTile, unused);
          });
        };
        if (has_pairs(in) || task.has_dbias) {
          const int64_t parts = (keys + kFetchKeys - 1) / kFetchKeys;
          for (int64_t part = 0; part < parts; ++part) {
            prefetch_terms<T>(in, head, at, part, parts);
            if (task.has_dbias) dbias.prefetch(at, part, parts);
            products_of(part * kFetchKeys, part + 1 < parts ? (part + 1) * kFetchKeys : keys);
          }
        } else {
          products_of(0, keys);
        }
        if (in.mask && !one_row_mask) visible = make_mask_words<kTileVecs>(in, head, at, scratch.words);
        if (visible == Seen::kNone) continue;
        // An Inf in k times the zeros of a lane beyond the tensor is NaN.
        for (int64_t key = 0; rows < kTile && key < keys; ++key)
          for (int64_t i = rows; i < kTile; ++i) scratch.s[key * kTile + i] = 0;
        const bool hidden = in.bias || visible == Seen::kSome || mixed, masked = at_edge || hidden;
        const bool element_wise = (masked || some_without) && (rows_nonfinite() || keys_nonfinite(key0, keys));

        const bool terms = capped && (added || hidden);
        float* const scores = terms ? scratch.terms : scratch.s;  // or what is added to them
        if (terms)
          for (int64_t i = 0; i < keys * kTile; i += kLanes) store(scratch.terms + i, zero());
        if (added) add_terms<kTileVecs, T>(in, head, at, capped ? 1.0f : static_cast<float>(scaling.magnitude), scores, unused);
        if (visible == Seen::kSome) hide_masked<kTileVecs>(scratch.words, keys, scores, unused);
        if (mixed) hide_documents<kTileVecs>(in, at, scores, unused);
        if (drops) make_dropout_words<kTileVecs>(in, head, at, scratch.words);

        gradients_of_block<Ops>(task, scratch, BlockKinds{hidden, terms, keeps, element_wise}, at.key, keys, mask, lse, delta);

        float* dk = scratch.dk + key0 * width;
        float* dv = scratch.dv + key0 * width_v;
        bool split_k = false;  // of the block
        if (element_wise) {
          if (rows_nonfinite() && !rows_split) split_rows();
          const T* k_block = k + key0 * task.k_stride;
          split_k = keys_nonfinite(key0, keys);
          if (split_k) split_nonfinite(k_block, task.k_stride, keys, task.headdim, true, scratch.finite_rows, scratch.code_rows);
          find_hidden(in, scratch, mask, lse, head, at);
          hide_and_tell_kinds(Ops{}, scratch.hidden, keys, scratch.p_rows, scratch.ds_rows, scratch.ds_columns, scratch.kinds_rows,
                              scratch.kinds_columns);
          for (int64_t i = 0; keeps && i < keys * kTile; ++i)
            if (scratch.hidden[i] == minus_infinity()) scratch.score_gradient[i] = 0;
        }
        if (task.has_dbias) {
          pass_over(dbias_end, key0);
          dbias.template add<kTileVecs>(bias_gradient, at);
          dbias_end = key0 + keys;
        }
        const auto add_to_keys = [&](const typename Ops::Element* of_pairs, const typename Ops::Element* columns, int headdim, float* to) {
          const int64_t row_width = round_up(headdim, kLanes), part = at_edge ? kTile / 2 : kTile;
          for (int64_t row = 0; row < rows; row += part) {
            const KeyRange seen = keys_seen_by(row, part);
            if (seen.begin >= seen.end) continue;
            const auto* a = of_pairs + seen.begin * elements<Ops>(kTile) + row / Ops::kPair;
            product_into_wide_rows<Ops>(Scalars{reinterpret_cast<const char*>(a), elements<Ops>(kTile) * 4}, seen.end - seen.begin,
                                        columns + row / Ops::kPair * copy_stride(headdim), copy_stride(headdim),
                                        elements<Ops>(rows - row < part ? rows - row : part), to + seen.begin * row_width, row_width,
                                        row_width / kLanes);
          }
        };
        const auto add_nonfinite_to_keys = [&](const typename Ops::Element* codes, int headdim, float* to) {
          const int64_t n = keys * round_up(headdim, kLanes);
          for (int64_t i = 0; i < n; i += kLanes) store(scratch.sums + i, zero());
          add_to_keys(scratch.kinds_rows, codes, headdim, scratch.sums);
          for (int64_t i = 0; i < n; i += kLanes) add_decoded(scratch.sums + i, to + i);
        };
        const bool split_dout = element_wise && dout_nonfinite, split_q = element_wise && q_nonfinite;
        add_to_keys(scratch.p_rows, split_dout ? scratch.dout_finite : scratch.dout_columns, task.headdim_v, dv);
        if (split_dout) add_nonfinite_to_keys(scratch.dout_codes, task.headdim_v, dv);
        add_to_keys(scratch.ds_rows, split_q ? scratch.q_finite : scratch.q_columns, task.headdim, dk);
        if (split_q) add_nonfinite_to_keys(scratch.q_codes, task.headdim, dk);
        const auto add_to_rows = [&](Scalars of_keys, const typename Ops::Element* of_pairs, float* to) {
          for_parts([&](int w, auto count) {
            constexpr int kVecs = decltype(count)::value;
            const KeyRange seen = keys_seen_by(w * kLanes, kVecs * kLanes);
            if (seen.begin >= seen.end) return;
            const Scalars kc{of_keys.data + seen.begin / Ops::kPair * of_keys.stride, of_keys.stride};
            product_by_column<Ops, kVecs>(kc, task.headdim, of_pairs + seen.begin / Ops::kPair * kTile + w * kLanes, kTile,
                                          elements<Ops>(seen.end - seen.begin), to + lane_offset(task.headdim, w * kLanes), one);
          });
        };
        if (!split_k) {
          add_to_rows(Scalars{k_columns.data + key0 / Ops::kPair * k_columns.stride, k_columns.stride}, scratch.ds_columns, scratch.dq);
          continue;
        }
        const auto columns_of = [&](const T* from, typename Ops::Element* buffer) {
          return Operand<T, Ops>::column_scalars(from, task.headdim, keys, task.headdim, buffer);
        };
        const int64_t n = static_cast<int64_t>(task.headdim) * kTile;
        add_to_rows(columns_of(scratch.finite_rows, scratch.k_finite), scratch.ds_columns, scratch.dq);
        for (int64_t i = 0; i < n; i += kLanes) store(scratch.sums + i, zero());
        add_to_rows(columns_of(scratch.code_rows, scratch.k_codes), scratch.kinds_columns, scratch.sums);
        for (int64_t i = 0; i < n; i += kLanes) add_decoded(scratch.sums + i, scratch.dq + i);
      }

      pass_over(dbias_end, task_keys);

      await_turn(task, row0, head);
      const DqRows<T> dq(task, head, row0);
      const F32 scale = set1(task.scale);
      unpack_transposed(scratch.dq, rows, task.headdim, [&](int64_t row, int64_t d, F32 x, int64_t columns) {
        if (!has_gradient(lse[row])) return;  // 0 * -inf, where k holds -inf, is NaN
        dq.add(row, d, x, scale, columns);
      });
    }
  }

  const F32 scale = set1(task.scale);
  for (int64_t key = 0; key < task_keys; ++key) {
    T* dk = static_cast<T*>(task.dk) + (task.key_begin + key) * task.dk_stride;
    T* dv = static_cast<T*>(task.dv) + (task.key_begin + key) * task.dv_stride;
    for (int64_t d = 0; d < task.headdim; d += kLanes) store_n(dk + d, mul(load(scratch.dk + key * width + d), scale), task.headdim - d);
    for (int64_t d = 0; d < task.headdim_v; d += kLanes) store_n(dv + d, load(scratch.dv + key * width_v + d), task.headdim_v - d);
  }
}

template <class T, class Ops>
size_t backward_scratch_bytes(const KernelShape& shape) {
  BackwardScratch<T, Ops> scratch;
  return scratch.lay_out(nullptr, shape.task_k, shape.block_k, shape.headdim, shape.headdim_v, shape.inputs);
}

template <class T>
void row_dots_of(const void* a, int64_t a_stride, const void* b, int64_t b_stride, int64_t rows, int headdim, float* to, int64_t to_stride) {
  for (int64_t r = 0; r < rows; ++r) {
    F32 total = zero();
    for (int64_t d = 0; d < headdim; d += kLanes)
      total = fma(load_n(static_cast<const T*>(a) + r * a_stride + d, headdim - d), load_n(static_cast<const T*>(b) + r * b_stride + d, headdim - d),
                  total);
    to[r * to_stride] = sum(total);
  }
}

template <class T>
void sum_rows_of(const float* parts, int64_t part_stride, int64_t nparts, int64_t headdim, void* to) {
  for (int64_t d = 0; d < headdim; d += kLanes) {
    F32 total = load_n(parts + d, headdim - d);
    for (int64_t i = 1; i < nparts; ++i) total = add(total, load_n(parts + i * part_stride + d, headdim - d));
    store_n(static_cast<T*>(to) + d, total, headdim - d);
  }
}

}  // namespace fattn::core::FATTN_ISA
