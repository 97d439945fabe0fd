// A panel of the forward kernel (forward.h): a few vectors of query rows, in lanes, with a block of keys. Parts of it are the backward pass's, too.
#pragma once

#include "backend/cpu/dropout_words.h"
#include "backend/cpu/forward_scratch.h"
#include "backend/cpu/nonfinite.h"

namespace fattn::core::FATTN_ISA {

// S^T -> P^T for fp32 products, in place. Returns the sums of the block in block_sum.
template <int kVecs>
FATTN_INLINE void exponentials(OpsF32, float* scores, float* weights, int64_t n, float factor, const F32* largest, F32* block_sum) {
  constexpr int64_t kStride = kVecs * kLanes;
  const F32 f = set1(factor);
  F32 total[kVecs];
  FATTN_UNROLL
  for (int w = 0; w < kVecs; ++w) total[w] = zero();
  for (int64_t key = 0; key < n; ++key) FATTN_UNROLL
  for (int w = 0; w < kVecs; ++w) {
    const F32 p = exp2(mul(sub(load(scores + key * kStride + w * kLanes), largest[w]), f));
    total[w] = add(total[w], p);
    store(weights + key * kStride + w * kLanes, p);
  }
  FATTN_UNROLL
  for (int w = 0; w < kVecs; ++w) block_sum[w] = total[w];
}

#ifdef FATTN_DOT
// The same for bf16 products: weights in pairs of keys. An odd last key is paired with 0.
template <int kVecs>
FATTN_INLINE void exponentials(OpsDot, float* scores, uint32_t* weights, int64_t n, float factor, const F32* largest, F32* block_sum) {
  constexpr int64_t kStride = kVecs * kLanes;
  const F32 f = set1(factor);
  F32 total[kVecs];
  FATTN_UNROLL
  for (int w = 0; w < kVecs; ++w) total[w] = zero();
  for (int64_t key = 0; key < n; key += 2) FATTN_UNROLL
  for (int w = 0; w < kVecs; ++w) {
    const float* at = scores + key * kStride + w * kLanes;
    const F32 p0 = exp2_of_sum(mul(sub(load(at), largest[w]), f));
    const F32 p1 = key + 1 < n ? exp2_of_sum(mul(sub(load(at + kStride), largest[w]), f)) : zero();
    total[w] = add(total[w], add(p0, p1));
    store_pairs(weights + key / 2 * kStride + w * kLanes, make_pairs(p0, p1));
  }
  FATTN_UNROLL
  for (int w = 0; w < kVecs; ++w) block_sum[w] = total[w];
}
#endif

// largest[w] = max(largest[w], scores of the keys [begin, end)).
template <int kVecs>
FATTN_INLINE void take_largest(const float* scores, int64_t begin, int64_t end, F32* largest) {
  for (int64_t key = begin; key < end; ++key) FATTN_UNROLL
  for (int w = 0; w < kVecs; ++w) largest[w] = max(largest[w], load(scores + (key * kVecs + w) * kLanes));
}

// Hides from every lane the keys outside of [first_seen + lane, first_hidden + lane); largest[w] = max(largest[w], the rest).
template <int kVecs>
FATTN_INLINE void hide_scores(float* scores, int64_t begin, int64_t end, int64_t first_seen, int64_t first_hidden, F32* largest) {
  constexpr int64_t kStride = kVecs * kLanes;
  const F32 hidden = set1(minus_infinity());
  // So far off that no lane of these keys is beyond them, edges may be too far off for an int.
  const bool at_begin = begin<first_seen + kStride - 1, at_end = end> first_hidden;
  for (int64_t key = begin; key < end; ++key)
    for (int w = 0; w < kVecs; ++w) {
      float* at = scores + key * kStride + w * kLanes;
      F32 s = load(at);
      if (at_end) s = keep_from(s, static_cast<int>(key - first_hidden + 1 - w * kLanes), hidden);
      if (at_begin) s = keep_below(s, static_cast<int>(key - first_seen + 1 - w * kLanes), hidden);
      largest[w] = max(largest[w], s);
      store(at, s);
    }
}

// Adds to O^T of a panel what Inf and NaN in V, given as `codes`, are to the pairs that rows see.
template <class T, class Ops, int kVecs>
__attribute__((noinline)) void add_nonfinite(const ForwardTask& task, ForwardScratch<T, Ops>& scratch, const Codes& codes, const TilePlace& at,
                                             int64_t first_seen, int64_t first_hidden, Seen mask_shows, float* o) {
  constexpr int64_t kStride = kVecs * kLanes;
  const ScoreInputs& in = task.inputs;
  F32 unused[kVecs], one[kVecs];
  for (int w = 0; w < kVecs; ++w) unused[w] = one[w] = set1(1.0f);
  for (int64_t i = 0; i < at.keys * kStride; i += kLanes) store(scratch.hidden + i, zero());
  if (in.bias) add_terms<kVecs, T>(in, 0, at, 1.0f, scratch.hidden, unused);
  if (mask_shows == Seen::kSome) {
    if (in.dropout_below > 0) make_mask_words<kVecs>(in, 0, at, scratch.words);  // dropout has the words
    hide_masked<kVecs>(scratch.words, at.keys, scratch.hidden, unused);
  }
  if (in.document_q) hide_documents<kVecs>(in, at, scratch.hidden, unused);
  if (first_seen + kStride - 1 > 0 || first_hidden < at.keys) hide_scores<kVecs>(scratch.hidden, 0, at.keys, first_seen, first_hidden, unused);
  kinds_of<kStride>(Ops{}, scratch.hidden, scratch.weights, at.keys, scratch.kinds);
  const KeyRange some = codes_that_count<Ops, kStride>(scratch.kinds, codes.marks, elements<Ops>(at.keys));
  if (some.begin == some.end) return;
  for (int64_t i = 0; i < task.headdim_v * kPanel; i += kLanes) store(scratch.sums + i, zero());
  product_by_column<Ops, kVecs>(codes.template from<Ops>(some.begin * Ops::kPair).rows, task.headdim_v, scratch.kinds + some.begin * kStride, kStride,
                                some.end - some.begin, scratch.sums, one);
  for (int64_t i = 0; i < task.headdim_v * kPanel; i += kPanel)
    for (int64_t l = 0; l < kStride; l += kLanes) add_decoded(scratch.sums + i + l, o + i + l);
}

// S^T of a panel and the block's n = at.keys keys, as options make it, but for what the mask and documents hide. The maximum of the keys [seen,
// whole) goes to `top`, which has the one so far. Returns which pairs a mask of pairs shows; Seen::kNone: the panel has nothing of the block.
template <class T, class Ops, int kVecs>
FATTN_INLINE Seen score_panel(const ForwardTask& task, const typename Ops::Element* q, ForwardScratch<T, Ops>& scratch, Scalars k,
                              const TilePlace& at, int64_t seen, int64_t whole, F32* top, F32* unused) {
  constexpr int64_t kStride = kVecs * kLanes;
  const ScoreInputs& inputs = task.inputs;
  const int64_t n = at.keys;
  const auto products_of = [&](int64_t begin, int64_t end, F32* largest) {
    product_by_row<Ops, kVecs>(Scalars{k.data + begin * k.stride, k.stride}, end - begin, q, elements<Ops>(task.headdim),
                               scratch.scores + begin * kStride, kStride, largest);
  };
  const bool capped = task.softcap > 0, added = adds(inputs), fetches = has_pairs(inputs);
  if (!capped && !added && !inputs.mask) {
    products_of(seen, whole, top);
    if (seen > 0) products_of(0, seen, unused);
    if (whole < n) products_of(whole, n, unused);
    return Seen::kAll;
  }
  // Each pass leaves the maximum of all keys; that of the last one counts.
  const double magnitude = Scale(task.scale).magnitude;
  F32 old[kVecs], reached[kVecs];
  for (int w = 0; w < kVecs; ++w) old[w] = top[w];
  const auto restart = [&] {
    for (int w = 0; w < kVecs; ++w) reached[w] = old[w];
  };
  const bool one_row = inputs.mask && inputs.mask_stride == 0;
  Seen visible = one_row ? make_mask_words<kVecs>(inputs, 0, at, scratch.words) : Seen::kAll;
  if (visible == Seen::kNone) return visible;
  restart();
  const int64_t parts = fetches ? (n + kFetchKeys - 1) / kFetchKeys : 1;
  for (int64_t part = 0; part < parts; ++part) {
    if (fetches) prefetch_terms<T>(inputs, 0, at, part, parts);
    products_of(part * kFetchKeys, part + 1 < parts ? (part + 1) * kFetchKeys : n, reached);
  }
  if (inputs.mask && !one_row) visible = make_mask_words<kVecs>(inputs, 0, at, scratch.words);
  if (visible == Seen::kNone) return visible;
  if (capped) {
    restart();
    cap_scores<kVecs>(CappedScore(magnitude, task.softcap, task.own_blocks), scratch.scores, n, reached);
  }
  if (added) {
    restart();
    add_terms<kVecs, T>(inputs, 0, at, capped ? 1.0f : static_cast<float>(magnitude), scratch.scores, reached);
  }
  if (visible == Seen::kSome) {
    restart();
    hide_masked<kVecs>(scratch.words, n, scratch.scores, reached);
  }
  if (seen > 0 || whole < n) {
    take_largest<kVecs>(scratch.scores, seen, whole, top);
  } else {
    for (int w = 0; w < kVecs; ++w) top[w] = reached[w];
  }
  return visible;
}

// P^T of a panel from its scores, whose largest are `top` and were `old` before the block; O^T += V^T P^T of what dropout leaves.
template <class T, class Ops, int kVecs>
FATTN_INLINE void weigh_panel(const ForwardTask& task, const ForwardTile<Ops>& tile, int lane0, ForwardScratch<T, Ops>& scratch, Scalars v,
                              const TilePlace& at, const F32* old, const F32* top) {
  constexpr int64_t kStride = kVecs * kLanes;
  // A row that has seen nothing yet has the maximum -inf; subtracting 0 instead keeps -inf - -inf = NaN away.
  const float factor = Exponent(task).factor;
  F32 safe[kVecs], alpha[kVecs], block_sum[kVecs];
  for (int w = 0; w < kVecs; ++w) {
    store(tile.largest + lane0 + w * kLanes, top[w]);
    safe[w] = where_equal(top[w], set1(minus_infinity()), zero(), top[w]);
    alpha[w] = exp2(mul(sub(old[w], safe[w]), set1(factor)));
  }
  exponentials<kVecs>(Ops{}, scratch.scores, scratch.weights, at.keys, factor, safe, block_sum);
  for (int w = 0; w < kVecs; ++w) {
    float* sum = tile.sum + lane0 + w * kLanes;
    store(sum, fma(load(sum), alpha[w], block_sum[w]));
  }
  if (task.inputs.dropout_below > 0) {  // of the weights, not of their sum
    make_dropout_words<kVecs>(task.inputs, 0, at, scratch.words);
    drop_weights<kVecs>(Ops{}, at.key, scratch.words, at.keys, scratch.weights);
  }
  product_by_column<Ops, kVecs>(v, task.headdim_v, scratch.weights, kStride, elements<Ops>(at.keys), tile.o + lane_offset(task.headdim_v, lane0),
                                alpha);
}

// A block of keys for one panel of kVecs vectors of query rows, the first of which is lane 0 here; `at` says which. Lane i sees
// the keys [first_seen + i, first_hidden + i) of the block. `mixed`: of different documents. `codes`: of V's Inf and NaN, which v lacks then, where
// some row of the tile does not see one.
template <class T, class Ops, int kVecs>
__attribute__((noinline)) void forward_panel(const ForwardTask& task, const ForwardTile<Ops>& tile, int first_vec, ForwardScratch<T, Ops>& scratch,
                                             Scalars k, Scalars v, Codes codes, TilePlace at, int64_t first_seen, int64_t first_hidden, bool mixed) {
  constexpr int64_t kStride = kVecs * kLanes;
  const int lane0 = first_vec * kLanes;
  const int64_t unit = task.inputs.dropout_below > 0 ? kDropoutBlock : Ops::kPair;
  if (first_seen >= unit) {  // no lane sees the first keys
    const int64_t skip = first_seen / unit * unit;
    k.data += skip * k.stride;
    v.data += skip / Ops::kPair * v.stride;
    if (codes.any()) codes = codes.template from<Ops>(skip);
    at.key += skip;
    at.keys -= skip;
    first_seen -= skip;
    first_hidden -= skip;
  }
  const int64_t last = first_hidden + kStride - 1;  // keys that the panel's last row sees
  const int64_t n = at.keys < last ? at.keys : last;
  if (n <= 0) return;
  at.keys = n;
  // Keys [seen, whole) are seen by every row; `whole` at the diagonal is a multiple of the micro-kernel's 6 rows.
  const int64_t whole = first_hidden < 0 ? 0 : first_hidden < n ? first_hidden / 6 * 6 : n;
  const int64_t edge = first_seen + kStride - 1;
  const int64_t seen = edge < 0 ? 0 : edge < whole ? edge : whole;

  F32 top[kVecs], old[kVecs], unused[kVecs];
  for (int w = 0; w < kVecs; ++w) top[w] = old[w] = unused[w] = load(tile.largest + lane0 + w * kLanes);
  F32* const seen_top = mixed ? unused : top;  // what documents leave is known in the end
  const Seen visible =
      score_panel<T, Ops, kVecs>(task, tile.q + lane_offset(elements<Ops>(task.headdim), lane0), scratch, k, at, seen, whole, seen_top, unused);
  if (visible == Seen::kNone) return;
  if (seen > 0) hide_scores<kVecs>(scratch.scores, 0, seen, first_seen, first_hidden, seen_top);
  if (whole < n) hide_scores<kVecs>(scratch.scores, whole, n, first_seen, first_hidden, seen_top);
  if (mixed) hide_documents<kVecs>(task.inputs, at, scratch.scores, top);

  weigh_panel<T, Ops, kVecs>(task, tile, lane0, scratch, v, at, old, top);
  if (codes.any())
    add_nonfinite<T, Ops, kVecs>(task, scratch, codes, at, first_seen, first_hidden, visible, tile.o + lane_offset(task.headdim_v, lane0));
}

}  // namespace fattn::core::FATTN_ISA
