// Forward pass of the CPU backend (FlashAttention-2, algorithm 1: Q blocks outside, K/V blocks inside), and its parts that
// the backward pass shares. A task holds up to a few tiles of kTile query rows, so that a K/V block is read (and widened)
// once for all of them.
#pragma once

#include "backend/cpu/dropout_words.h"
#include "backend/cpu/forward_scratch.h"
#include "backend/cpu/nonfinite.h"
#include "backend/cpu/pages.h"

namespace fattn::core::FATTN_ISA {

// Scores are products q k, or whole; `factor` makes them exponents of 2 (score.h). The maximum is subtracted first: the
// difference is exact where it is small, which is where the weight is large, and the largest weight is exactly 1.

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

// A block of keys for one panel of kVecs vectors of query rows, the first of which is lane 0 here; `at` says which. Lane i sees
// the keys [first_seen + i, first_hidden + i) of the block. `mixed`: of different documents. `codes`: of V's Inf and NaN, which v lacks then, where
// some row of the tile does not see one.
template <class T, class Ops, int kVecs>
__attribute__((noinline)) void forward_panel(const ForwardTask& task, const ForwardTile<Ops>& tile, int first_vec, ForwardScratch<T, Ops>& scratch,
                                             Scalars k, Scalars v, Codes codes, TilePlace at, int64_t first_seen, int64_t first_hidden, bool mixed) {
  constexpr int64_t kStride = kVecs * kLanes;
  const int lane0 = first_vec * kLanes;
  const ScoreInputs& inputs = task.inputs;
  const int64_t unit = inputs.dropout_below > 0 ? kDropoutBlock : Ops::kPair;
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
  // Keys [seen, whole) are seen by every row; `whole` at the diagonal is a multiple of the micro-kernel's 6 rows.
  const int64_t whole = first_hidden < 0 ? 0 : first_hidden < n ? first_hidden / 6 * 6 : n;
  const int64_t edge = first_seen + kStride - 1;
  const int64_t seen = edge < 0 ? 0 : edge < whole ? edge : whole;

  F32 top[kVecs], old[kVecs], unused[kVecs];
  for (int w = 0; w < kVecs; ++w) top[w] = old[w] = unused[w] = load(tile.largest + lane0 + w * kLanes);
  F32* const seen_top = mixed ? unused : top;  // what documents leave is known in the end
  const int64_t steps = elements<Ops>(task.headdim);
  at.keys = n;
  const auto products_of = [&](int64_t begin, int64_t end, F32* largest) {
    product_by_row<Ops, kVecs>(Scalars{k.data + begin * k.stride, k.stride}, end - begin, tile.q + lane_offset(steps, lane0), steps,
                               scratch.scores + begin * kStride, kStride, largest);
  };
  const bool capped = task.softcap > 0, added = adds(inputs), fetches = has_pairs(inputs);
  Seen visible = Seen::kAll;  // of pairs, by a mask
  if (!capped && !added && !inputs.mask) {
    products_of(seen, whole, seen_top);
    if (seen > 0) products_of(0, seen, unused);
    if (whole < n) products_of(whole, n, unused);
  } else {
    // Each pass leaves the maximum of all keys; that of the last one counts.
    const double magnitude = Scale(task.scale).magnitude;
    F32 reached[kVecs];
    const auto restart = [&] {
      for (int w = 0; w < kVecs; ++w) reached[w] = old[w];
    };
    const bool one_row = inputs.mask && inputs.mask_stride == 0;
    visible = one_row ? make_mask_words<kVecs>(inputs, 0, at, scratch.words) : Seen::kAll;
    if (visible == Seen::kNone) return;
    restart();
    const int64_t parts = fetches ? (n + kFetchKeys - 1) / kFetchKeys : 1;
    for (int64_t part = 0; part < parts; ++part) {
      if (fetches) prefetch_terms<T>(inputs, 0, at, part, parts);
      products_of(part * kFetchKeys, part + 1 < parts ? (part + 1) * kFetchKeys : n, reached);
    }
    if (inputs.mask && !one_row) visible = make_mask_words<kVecs>(inputs, 0, at, scratch.words);
    if (visible == Seen::kNone) return;
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
      take_largest<kVecs>(scratch.scores, seen, whole, seen_top);
    } else {
      for (int w = 0; w < kVecs; ++w) seen_top[w] = reached[w];
    }
  }
  if (seen > 0) hide_scores<kVecs>(scratch.scores, 0, seen, first_seen, first_hidden, seen_top);
  if (whole < n) hide_scores<kVecs>(scratch.scores, whole, n, first_seen, first_hidden, seen_top);
  if (mixed) hide_documents<kVecs>(inputs, at, scratch.scores, top);

  // A row that has seen nothing yet has the maximum -inf; subtracting 0 instead keeps -inf - -inf = NaN away.
  const float factor = Exponent(task).factor;
  F32 safe[kVecs], alpha[kVecs], block_sum[kVecs];
  for (int w = 0; w < kVecs; ++w) {
    store(tile.largest + lane0 + w * kLanes, top[w]);
    safe[w] = where_equal(top[w], set1(minus_infinity()), zero(), top[w]);
    alpha[w] = exp2(mul(sub(old[w], safe[w]), set1(factor)));
  }
  exponentials<kVecs>(Ops{}, scratch.scores, scratch.weights, n, factor, safe, block_sum);
  for (int w = 0; w < kVecs; ++w) {
    float* sum = tile.sum + lane0 + w * kLanes;
    store(sum, fma(load(sum), alpha[w], block_sum[w]));
  }
  if (inputs.dropout_below > 0) {  // of the weights, not of their sum
    make_dropout_words<kVecs>(inputs, 0, at, scratch.words);
    drop_weights<kVecs>(Ops{}, at.key, scratch.words, n, scratch.weights);
  }
  float* const o = tile.o + lane_offset(task.headdim_v, lane0);
  product_by_column<Ops, kVecs>(v, task.headdim_v, scratch.weights, kStride, elements<Ops>(n), o, alpha);
  if (codes.any()) add_nonfinite<T, Ops, kVecs>(task, scratch, codes, at, first_seen, first_hidden, visible, o);
}

// o = O / sum, with dropout times its scale, lse = log(sum) + largest; a row without keys gives 0 and -inf. A sink joins the sum.
template <class T, class Ops>
void finish_tile(const ForwardTask& task, const ForwardTile<Ops>& tile, int64_t row0, int64_t rows) {
  const Exponent exponent(task);
  float inverse[kTile], added[kTile] = {};
  if (task.inputs.sink)
    for (int i = 0; i < kTile; ++i) added[i] = weight_of_sink(*task.inputs.sink, static_cast<double>(tile.largest[i]) * exponent.magnitude);
  for (int i = 0; i < kTile; ++i) inverse[i] = tile.sum[i] == 0.0f ? 0.0f : task.inputs.dropout_scale / (tile.sum[i] + added[i]);
  const auto store_rows = [&](auto* o) {
    o += row0 * task.o_stride;
    unpack_transposed(tile.o, rows, task.headdim_v, [&](int64_t row, int64_t d, F32 x, int64_t columns) {
      store_n(o + row * task.o_stride + d, mul(x, set1(inverse[row])), columns);
    });
  };
  task.fp32_out ? store_rows(static_cast<float*>(task.o)) : store_rows(static_cast<T*>(task.o));
  if (!task.lse) return;
  const float none = task.inputs.sink ? *task.inputs.sink : minus_infinity();
  for (int64_t i = 0; i < rows; ++i) {
    const double lse = static_cast<double>(tile.largest[i]) * exponent.magnitude + 0.69314718055994530942 * log2_of(tile.sum[i] + added[i]);
    const bool is_sink = tile.sum[i] == 0.0f || (added[i] >= kGreatestSink && tile.sum[i] == tile.sum[i]);
    task.lse[(row0 + i) * task.lse_stride] = is_sink ? none : static_cast<float>(lse);
  }
}

template <class T, class Ops>
void forward_task(const ForwardTask& task) {
  ForwardScratch<T, Ops> scratch;
  const int64_t rows = task.row_end - task.row_begin;
  scratch.lay_out(static_cast<char*>(task.scratch), rows, task.block_k, task.headdim, task.headdim_v, !is_plain(task.inputs),
                  task.pages.table != nullptr);
  const int64_t tiles = (rows + kTile - 1) / kTile;

  const Scale scale(task.scale);
  const T* q = static_cast<const T*>(task.q);
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t row0 = task.row_begin + t * kTile;
    const int64_t here = task.row_end - row0 < kTile ? task.row_end - row0 : kTile;
    ForwardTile<Ops>& tile = scratch.tiles[t];
    pack_lanes(Ops{}, q + row0 * task.q_stride, task.q_stride, here, task.headdim, scale.sign, tile.q);
    for (int64_t i = 0; i < static_cast<int64_t>(task.headdim_v) * kTile; i += kLanes) store(tile.o + i, zero());
    for (int i = 0; i < kTile; ++i) {
      tile.largest[i] = minus_infinity();
      tile.sum[i] = 0.0f;
    }
  }

  const int64_t seen = task.row_end - 1 + task.diagonal;  // keys that the last row sees
  int64_t keys = seen < task.seqlen_k ? seen : task.seqlen_k;
  const int64_t unseen = task.row_begin + task.left_diagonal;  // keys that not even the first row sees
  int64_t first_key = unseen > 0 ? unseen : 0;
  const int32_t *row_ids = task.inputs.document_q, *key_ids = task.inputs.document_k;
  IdRange ids{}, tile_ids[ForwardScratch<T, Ops>::kMaxTiles];
  if (row_ids) {
    ids = ids_of(row_ids, task.row_begin, task.row_end);
    const KeyRange some = keys_of(ids, key_ids, first_key, keys);
    first_key = some.begin;
    keys = some.end;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t row0 = task.row_begin + t * kTile;
      tile_ids[t] = ids_of(row_ids, row0, task.row_end - row0 < kTile ? task.row_end : row0 + kTile);
    }
  }
  const KeyRows<T> all_k = KeyRows<T>::keys(task), all_v = KeyRows<T>::values(task);
  const int64_t unit = task.inputs.dropout_below > 0 ? kDropoutBlock : 1, part_unit = unit > 1 ? unit : Ops::kPair;
  const int64_t begin_unit = task.own_blocks ? task.block_k * unit : unit;
  for (int64_t key0 = first_key / begin_unit * begin_unit; key0 < keys; key0 += task.block_k) {
    const int64_t block = keys - key0 < task.block_k ? keys - key0 : task.block_k;
    const IdRange block_ids = row_ids ? ids_of(key_ids, key0, key0 + block) : IdRange{};
    if (row_ids && !may_meet(ids, block_ids)) continue;
    const Rows<T> k_of_block = all_k.side_by_side(key0, block, task.headdim, scratch.paged_k),
                  v_of_block = all_v.side_by_side(key0, block, task.headdim_v, scratch.paged_v);
    const T *const k_rows = k_of_block.data, *const v_rows = v_of_block.data;
    const int64_t k_stride = k_of_block.stride, v_stride = v_of_block.stride;
    const Scalars k = Operand<T, Ops>::row_scalars(k_rows, k_stride, block, task.headdim, scratch.k, kInPlace);
    const Scalars v = Operand<T, Ops>::column_scalars(v_rows, v_stride, block, task.headdim_v, scratch.v, kInPlace);
    NextKeys<T> next_k, next_v;
    if (kFetchesAhead && key0 + block < keys) {
      const int64_t next = keys - key0 - block < task.block_k ? keys - key0 - block : task.block_k;
      next_k = NextKeys<T>(all_k, key0 + block, next, task.headdim);
      next_v = NextKeys<T>(all_v, key0 + block, next, task.headdim_v);
    }
    const int64_t fetched = (task.block_k + kPanelsOfTile * tiles - 1) / (kPanelsOfTile * tiles);  // rows a panel
    const bool all_poisoned = hides(task.inputs) && any_nonfinite(v_rows, v_stride, block, task.headdim_v);
    Scalars finite{};  // these once they are wanted
    Codes codes{};
    const auto split_values = [&] {
      split_nonfinite(v_rows, v_stride, block, task.headdim_v, false, scratch.finite_rows, scratch.code_rows);
      finite = Operand<T, Ops>::column_scalars(scratch.finite_rows, task.headdim_v, block, task.headdim_v, scratch.finite);
      mark_nonfinite<Ops>(v_rows, v_stride, block, task.headdim_v, scratch.marks);
      codes = {Operand<T, Ops>::column_scalars(scratch.code_rows, task.headdim_v, block, task.headdim_v, scratch.codes), scratch.marks};
    };
    // Vectors [first_vec, end_vec) of tile t, rows of the documents `of_rows`, with their part of the block: all of it, or what is of their
    // documents.
    const auto attend = [&](int64_t t, int first_vec, int end_vec, IdRange of_rows) {
      KeyRange part{0, block};
      bool mixed = false;
      if (row_ids && !may_meet(of_rows, block_ids)) return;
      if (row_ids && !are_one(of_rows, block_ids)) {
        part = keys_of(of_rows, key_ids + key0, 0, block);
        if (part.begin == part.end) return;
        part.begin -= part.begin % part_unit;
        mixed = !are_one(of_rows, ids_of(key_ids + key0, part.begin, part.end));
      }
      const int64_t key_begin = key0 + part.begin, keys_here = part.end - part.begin;
      const T* values = v_rows + part.begin * v_stride;
      const int64_t row0 = task.row_begin + t * kTile;
      const int64_t here = task.row_end - row0 < kTile ? task.row_end - row0 : kTile;
      // For the tile's first row; what [seen_from, first_hidden) leaves of the part, some row does not see.
      const int64_t first_hidden = row0 + task.diagonal - key_begin, first_seen = row0 + task.left_diagonal - key_begin,
                    seen_from = first_seen + here - 1;
      const auto nonfinite = [&](int64_t from, int64_t to) {
        from = from < 0 ? 0 : from;
        to = to < keys_here ? to : keys_here;
        return from < to && any_nonfinite(values + from * v_stride, v_stride, to - from, task.headdim_v);
      };
      // Keys in pairs: the last of another document may be one with the part's last, at a weight of 0.
      const int64_t paired = elements<Ops>(keys_here) * Ops::kPair < block - part.begin ? elements<Ops>(keys_here) * Ops::kPair : block - part.begin;
      const bool behind = paired > keys_here && any_nonfinite(values + keys_here * v_stride, v_stride, paired - keys_here, task.headdim_v);
      bool poisoned = all_poisoned || behind || (mixed ? nonfinite(0, keys_here) : nonfinite(first_hidden, keys_here) || nonfinite(0, seen_from));
      if (poisoned) {
        const int64_t lane = static_cast<int64_t>(first_vec) * kLanes, end_lane = static_cast<int64_t>(end_vec) * kLanes;
        poisoned = !all_nan(scratch.tiles[t].o, task.headdim_v, lane, end_lane < here ? end_lane : here);
      }
      if (poisoned && !codes.any()) split_values();
      const auto part_of = [&](Scalars a) { return Scalars{a.data + part.begin / Ops::kPair * a.stride, a.stride}; };
      const Scalars k_part{k.data + part.begin * k.stride, k.stride}, v_part = part_of(poisoned ? finite : v);
      const Codes codes_part = poisoned ? codes.template from<Ops>(part.begin) : Codes{};
      const auto panel = [&](int w, auto count) {
        constexpr int kVecs = decltype(count)::value;
        const int64_t lane0 = static_cast<int64_t>(w) * kLanes, left = here - lane0, lanes = kVecs * kLanes;
        if constexpr (kFetchesAhead) {
          next_k.fetch(fetched);
          next_v.fetch(fetched);
        }
        const TilePlace at{row0 + lane0, left < lanes ? left : lanes, key_begin, keys_here};
        forward_panel<T, Ops, kVecs>(task, scratch.tiles[t], w, scratch, k_part, v_part, codes_part, at, first_seen + lane0, first_hidden + lane0,
                                     mixed);
      };
      if (kPanelVecs == 4 && (first_hidden < keys_here || seen_from > 0)) {
        // Half panels at an edge of the mask, which need fewer keys each.
        int w = first_vec;
        if (kPanel < kTile && w % 2 != 0) panel(w++, Count<1>{});
        for (; w < end_vec; w += 2) {
          if (w + 2 <= end_vec)
            panel(w, Count<2>{});
          else
            panel(w, Count<1>{});
        }
      } else {
        for_panels(first_vec, end_vec, panel);
      }
    };
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t row0 = task.row_begin + t * kTile, here = task.row_end - row0 < kTile ? task.row_end - row0 : kTile;
      const int vecs = static_cast<int>((here + kLanes - 1) / kLanes);
      const auto ids_of_vec = [&](int w) {
        const int64_t end = static_cast<int64_t>(w + 1) * kLanes;
        return ids_of(row_ids, row0 + static_cast<int64_t>(w) * kLanes, row0 + (end < here ? end : here));
      };
      int mixed_vecs = 0;
      if (row_ids && !is_one(tile_ids[t]))
        for (int w = 0; w < vecs; ++w) mixed_vecs += !is_one(ids_of_vec(w));
      if (!row_ids || is_one(tile_ids[t]) || 2 * mixed_vecs > vecs) {
        attend(t, 0, vecs, row_ids ? tile_ids[t] : IdRange{});
        continue;
      }
      // Rows of one document together: they need the keys of their own only.
      for (int w = 0, end; w < vecs; w = end) {
        const IdRange of_rows = ids_of_vec(w);
        end = w + 1;
        while (end < vecs && are_one(of_rows, ids_of_vec(end))) ++end;
        attend(t, w, end, of_rows);
      }
    }
  }
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t row0 = task.row_begin + t * kTile;
    finish_tile<T, Ops>(task, scratch.tiles[t], row0, task.row_end - row0 < kTile ? task.row_end - row0 : kTile);
  }
}

template <class T, class Ops>
size_t forward_scratch_bytes(const KernelShape& shape) {
  ForwardScratch<T, Ops> scratch;
  return scratch.lay_out(nullptr, shape.rows, shape.block_k, shape.headdim, shape.headdim_v, shape.inputs, shape.paged);
}

}  // namespace fattn::core::FATTN_ISA
