// Backward pass of the CPU backend (FlashAttention-2, algorithm 2, with K/V blocks outside): a task owns a range of keys
// and their dK and dV, walks over all tiles of query rows that see them, the last one first, and adds its part of dQ.
//   P = exp(S - lse)   dV += P^T dO   dP = dO V^T   dS = P * (dP - delta)   dQ += scale dS K   dK += scale dS^T Q
#pragma once

#include "backend/cpu/backward_softmax.h"
#include "backend/cpu/bias_gradient.h"
#include "backend/cpu/dq_order.h"
#include "backend/cpu/dq_sums.h"
#include "device_abi/lowest.h"

namespace fattn::core::FATTN_ISA {

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

// dk and dv as Out, from sums in rows of `width` and `width_v`.
template <class Out>
void store_key_gradients(const BackwardTask& task, const float* dk_sums, int64_t width, const float* dv_sums, int64_t width_v) {
  const F32 scale = set1(task.scale);
  for (int64_t key = 0; key < task.key_end - task.key_begin; ++key) {
    Out* dk = static_cast<Out*>(task.dk) + (task.key_begin + key) * task.dk_stride;
    Out* dv = static_cast<Out*>(task.dv) + (task.key_begin + key) * task.dv_stride;
    for (int64_t d = 0; d < task.headdim; d += kLanes) store_n(dk + d, mul(load(dk_sums + key * width + d), scale), task.headdim - d);
    for (int64_t d = 0; d < task.headdim_v; d += kLanes) store_n(dv + d, load(dv_sums + key * width_v + d), task.headdim_v - d);
  }
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
        with_dq<T>(task, head + heads, row0 - to_next, [&](const auto& dq) {
          next_dq = dq.next(next, task.headdim);
          next_dq_low = dq.next_low(next, task.headdim);
        });
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
      const F32 scale = set1(task.scale);
      with_dq<T>(task, head, row0, [&](const auto& dq) {
        unpack_transposed(scratch.dq, rows, task.headdim, [&](int64_t row, int64_t d, F32 x, int64_t columns) {
          if (!has_gradient(lse[row])) return;  // 0 * -inf, where k holds -inf, is NaN
          dq.add(row, d, x, scale, columns);
        });
      });
    }
  }

  const float *const dk_sums = scratch.dk, *const dv_sums = scratch.dv;
  task.fp32_out ? store_key_gradients<float>(task, dk_sums, width, dv_sums, width_v) : store_key_gradients<T>(task, dk_sums, width, dv_sums, width_v);
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
