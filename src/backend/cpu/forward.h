// Forward pass of the CPU backend (FlashAttention-2, algorithm 1: Q blocks outside, K/V blocks inside). A task holds up to a few tiles of
// kTile query rows, so that a K/V block is read (and widened) once for all of them.
//
//   begin_tile of each: Q packed, O = 0, m = -inf, l = 0
//   for each block of keys that some row sees          run()
//     load_block           K and V as products take them; the next block is fetched meanwhile
//     for each tile, for each panel of its rows        attend_tile(), attend(), forward_panel.h
//       score_panel        S^T = K Q^T, m' = max(m, S)
//       weigh_panel        P = exp(S - m'), l = l exp(m - m') + sum(P), O^T = O^T exp(m - m') + V^T P^T
//   finish_tile of each: o = O / l, lse = m + log l
//
// Scores are products q k, or whole; `factor` makes them exponents of 2 (score.h). The maximum is subtracted first: the
// difference is exact where it is small, which is where the weight is large, and the largest weight is exactly 1.
#pragma once

#include "backend/cpu/forward_panel.h"
#include "backend/cpu/pages.h"

namespace fattn::core::FATTN_ISA {

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
class ForwardWalk {
 public:
  explicit ForwardWalk(const ForwardTask& task)
      : t_(task),
        in_(task.inputs),
        tiles_((task.row_end - task.row_begin + kTile - 1) / kTile),
        all_k_(KeyRows<T>::keys(task)),
        all_v_(KeyRows<T>::values(task)),
        fetched_((task.block_k + kPanelsOfTile * tiles_ - 1) / (kPanelsOfTile * tiles_)) {
    scratch_.lay_out(static_cast<char*>(task.scratch), task.row_end - task.row_begin, task.block_k, task.headdim, task.headdim_v, !is_plain(in_),
                     task.pages.table != nullptr);
  }

  void run() {
    for (int64_t t = 0; t < tiles_; ++t) begin_tile(t);
    const KeyRange some = keys_of_rows();
    const int64_t unit = in_.dropout_below > 0 ? kDropoutBlock : 1, begin_unit = t_.own_blocks ? t_.block_k * unit : unit;
    for (int64_t key0 = some.begin / begin_unit * begin_unit; key0 < some.end; key0 += t_.block_k) {
      if (!load_block(key0, some.end)) continue;
      for (int64_t t = 0; t < tiles_; ++t) attend_tile(t);
    }
    for (int64_t t = 0; t < tiles_; ++t) finish_tile<T, Ops>(t_, scratch_.tiles[t], first_row(t), rows_of(t));
  }

 private:
  static constexpr int64_t kMaxTiles = ForwardScratch<T, Ops>::kMaxTiles;

  bool documents() const { return in_.document_q != nullptr; }
  int64_t first_row(int64_t t) const { return t_.row_begin + t * kTile; }
  int64_t rows_of(int64_t t) const { return t_.row_end - first_row(t) < kTile ? t_.row_end - first_row(t) : kTile; }

  void begin_tile(int64_t t) {
    const int64_t row0 = first_row(t), rows = rows_of(t);
    ForwardTile<Ops>& tile = scratch_.tiles[t];
    pack_lanes(Ops{}, static_cast<const T*>(t_.q) + row0 * t_.q_stride, t_.q_stride, rows, t_.headdim, Scale(t_.scale).sign, tile.q);
    for (int64_t i = 0; i < static_cast<int64_t>(t_.headdim_v) * kTile; i += kLanes) store(tile.o + i, zero());
    for (int i = 0; i < kTile; ++i) {
      tile.largest[i] = minus_infinity();
      tile.sum[i] = 0.0f;
    }
    if (documents()) tile_ids_[t] = ids_of(in_.document_q, row0, row0 + rows);
  }

  // The keys that some row of the task sees.
  KeyRange keys_of_rows() {
    const int64_t seen = t_.row_end - 1 + t_.diagonal, unseen = t_.row_begin + t_.left_diagonal;  // by the last row; not even by the first
    const KeyRange some{unseen > 0 ? unseen : 0, seen < t_.seqlen_k ? seen : t_.seqlen_k};
    if (!documents()) return some;
    ids_ = ids_of(in_.document_q, t_.row_begin, t_.row_end);
    return keys_of(ids_, in_.document_k, some.begin, some.end);
  }

  // The block of keys from key0 on, of those before `end`, as products take it, and which comes next. False: of no document of the rows.
  bool load_block(int64_t key0, int64_t end) {
    Block& b = block_;
    b.key0 = key0;
    b.keys = end - key0 < t_.block_k ? end - key0 : t_.block_k;
    if (documents()) b.ids = ids_of(in_.document_k, key0, key0 + b.keys);
    if (documents() && !may_meet(ids_, b.ids)) return false;
    const Rows<T> k = all_k_.side_by_side(key0, b.keys, t_.headdim, scratch_.paged_k);
    b.values = all_v_.side_by_side(key0, b.keys, t_.headdim_v, scratch_.paged_v);
    b.k = Operand<T, Ops>::row_scalars(k.data, k.stride, b.keys, t_.headdim, scratch_.k, kInPlace);
    b.v = Operand<T, Ops>::column_scalars(b.values.data, b.values.stride, b.keys, t_.headdim_v, scratch_.v, kInPlace);
    b.finite = Scalars{};
    b.codes = Codes{};
    next_k_ = next_v_ = NextKeys<T>{};
    const int64_t left = end - key0 - b.keys;
    if (kFetchesAhead && left > 0) {
      const int64_t next = left < t_.block_k ? left : t_.block_k;
      next_k_ = NextKeys<T>(all_k_, key0 + b.keys, next, t_.headdim);
      next_v_ = NextKeys<T>(all_v_, key0 + b.keys, next, t_.headdim_v);
    }
    b.all_poisoned = hides(in_) && values_nonfinite(0, b.keys);
    return true;
  }

  // Tile t with the block. Of rows of several documents those of one are together: they need the keys of their own only.
  void attend_tile(int64_t t) {
    const int64_t row0 = first_row(t), rows = rows_of(t);
    const int vecs = static_cast<int>((rows + kLanes - 1) / kLanes);
    const auto ids_of_vec = [&](int w) {
      const int64_t end = static_cast<int64_t>(w + 1) * kLanes;
      return ids_of(in_.document_q, row0 + static_cast<int64_t>(w) * kLanes, row0 + (end < rows ? end : rows));
    };
    int mixed_vecs = 0;
    if (documents() && !is_one(tile_ids_[t]))
      for (int w = 0; w < vecs; ++w) mixed_vecs += !is_one(ids_of_vec(w));
    if (!documents() || is_one(tile_ids_[t]) || 2 * mixed_vecs > vecs) return attend(t, 0, vecs, documents() ? tile_ids_[t] : IdRange{});
    for (int w = 0, end; w < vecs; w = end) {
      const IdRange of_rows = ids_of_vec(w);
      end = w + 1;
      while (end < vecs && are_one(of_rows, ids_of_vec(end))) ++end;
      attend(t, w, end, of_rows);
    }
  }

  // Vectors [first_vec, end_vec) of tile t, rows of the documents `of_rows`, with their part of the block: all of it, or what is of their
  // documents.
  void attend(int64_t t, int first_vec, int end_vec, IdRange of_rows) {
    const Block& b = block_;
    KeyRange part{0, b.keys};
    bool mixed = false;
    if (documents() && !may_meet(of_rows, b.ids)) return;
    if (documents() && !are_one(of_rows, b.ids)) {
      const int64_t unit = in_.dropout_below > 0 ? kDropoutBlock : Ops::kPair;
      part = keys_of(of_rows, in_.document_k + b.key0, 0, b.keys);
      if (part.begin == part.end) return;
      part.begin -= part.begin % unit;
      mixed = !are_one(of_rows, ids_of(in_.document_k + b.key0, part.begin, part.end));
    }
    const int64_t key = b.key0 + part.begin, keys = part.end - part.begin, row0 = first_row(t), rows = rows_of(t);
    // For the tile's first row; what [seen_from, first_hidden) leaves of the part, some row does not see.
    const int64_t first_hidden = row0 + t_.diagonal - key, first_seen = row0 + t_.left_diagonal - key, seen_from = first_seen + rows - 1;
    const bool poisoned = hidden_nonfinite(part, mixed, first_hidden, seen_from) && !all_nan_already(t, first_vec, end_vec);
    if (poisoned && !b.codes.any()) split_values();
    const Scalars k{b.k.data + part.begin * b.k.stride, b.k.stride}, &v = poisoned ? b.finite : b.v;
    const Scalars v_part{v.data + part.begin / Ops::kPair * v.stride, v.stride};
    const Codes codes = poisoned ? b.codes.template from<Ops>(part.begin) : Codes{};
    const auto panel = [&](int w, auto count) {
      constexpr int kVecs = decltype(count)::value;
      const int64_t lane0 = static_cast<int64_t>(w) * kLanes, left = rows - lane0, lanes = kVecs * kLanes;
      if constexpr (kFetchesAhead) {
        next_k_.fetch(fetched_);
        next_v_.fetch(fetched_);
      }
      const TilePlace at{row0 + lane0, left < lanes ? left : lanes, key, keys};
      forward_panel<T, Ops, kVecs>(t_, scratch_.tiles[t], w, scratch_, k, v_part, codes, at, first_seen + lane0, first_hidden + lane0, mixed);
    };
    if (kPanelVecs < 4 || (first_hidden >= keys && seen_from <= 0)) return for_panels(first_vec, end_vec, panel);
    // Half panels at an edge of the mask, which need fewer keys each.
    int w = first_vec;
    if (kPanel < kTile && w % 2 != 0) panel(w++, Count<1>{});
    for (; w + 2 <= end_vec; w += 2) panel(w, Count<2>{});
    if (w < end_vec) panel(w, Count<1>{});
  }

  // Is there an Inf or NaN in the values of the block's keys [begin, end)?
  bool values_nonfinite(int64_t begin, int64_t end) const {
    return begin < end && any_nonfinite(block_.values.data + begin * block_.values.stride, block_.values.stride, end - begin, t_.headdim_v);
  }

  // The same of those keys of a part that some row does not see.
  bool hidden_nonfinite(KeyRange part, bool mixed, int64_t first_hidden, int64_t seen_from) const {
    const Block& b = block_;
    if (b.all_poisoned) return true;
    // Keys in pairs: the last of another document may be one with the part's last, at a weight of 0.
    const int64_t keys = part.end - part.begin, paired = elements<Ops>(keys) * Ops::kPair, rest = b.keys - part.begin;
    if (values_nonfinite(part.end, part.begin + (paired < rest ? paired : rest))) return true;
    const auto in_part = [&](int64_t from, int64_t to) {
      return values_nonfinite(part.begin + (from < 0 ? 0 : from), part.begin + (to < keys ? to : keys));
    };
    return mixed ? in_part(0, keys) : in_part(first_hidden, keys) || in_part(0, seen_from);
  }
  bool all_nan_already(int64_t t, int first_vec, int end_vec) const {
    const int64_t lane = static_cast<int64_t>(first_vec) * kLanes, end_lane = static_cast<int64_t>(end_vec) * kLanes, rows = rows_of(t);
    return all_nan(scratch_.tiles[t].o, t_.headdim_v, lane, end_lane < rows ? end_lane : rows);
  }

  // The block's values in two parts (nonfinite.h).
  void split_values() {
    Block& b = block_;
    split_nonfinite(b.values.data, b.values.stride, b.keys, t_.headdim_v, false, scratch_.finite_rows, scratch_.code_rows);
    b.finite = Operand<T, Ops>::column_scalars(scratch_.finite_rows, t_.headdim_v, b.keys, t_.headdim_v, scratch_.finite);
    mark_nonfinite<Ops>(b.values.data, b.values.stride, b.keys, t_.headdim_v, scratch_.marks);
    b.codes = {Operand<T, Ops>::column_scalars(scratch_.code_rows, t_.headdim_v, b.keys, t_.headdim_v, scratch_.codes), scratch_.marks};
  }

  struct Block {
    int64_t key0 = 0, keys = 0;
    IdRange ids{};
    Rows<T> values{};  // as they are
    Scalars k{}, v{};
    bool all_poisoned = false;  // pairs may be hidden anywhere, and values have an Inf or NaN
    Scalars finite{};           // values in two parts, once they are wanted
    Codes codes{};
  };

  const ForwardTask& t_;
  const ScoreInputs& in_;
  ForwardScratch<T, Ops> scratch_;
  const int64_t tiles_;
  const KeyRows<T> all_k_, all_v_;
  const int64_t fetched_;  // rows a panel, of the next block
  NextKeys<T> next_k_, next_v_;
  IdRange ids_{}, tile_ids_[kMaxTiles];
  Block block_;
};

template <class T, class Ops>
void forward_task(const ForwardTask& task) {
  ForwardWalk<T, Ops>(task).run();
}

template <class T, class Ops>
size_t forward_scratch_bytes(const KernelShape& shape) {
  ForwardScratch<T, Ops> scratch;
  return scratch.lay_out(nullptr, shape.rows, shape.block_k, shape.headdim, shape.headdim_v, shape.inputs, shape.paged);
}

}  // namespace fattn::core::FATTN_ISA
