// A block of keys of the backward walk (backward.h) with its tile of rows: scores, their gradients, and what they add to dk, dv and dq.
#pragma once

#include "backend/cpu/backward.h"

namespace fattn::core::FATTN_ISA {

// False: no row sees a key of the block.
template <class T, class Ops>
bool BackwardWalk<T, Ops>::begin_block(int64_t key0, int64_t keys) {
  Block& b = block_;
  b.key0 = key0;
  b.keys = keys;
  b.at = TilePlace{row0_, rows_, t_.key_begin + key0, keys};
  const IdRange block_ids = documents() ? ids_of_keys(key0, key0 + keys) : IdRange{};
  if (documents() && !may_meet(ids_, block_ids)) return false;
  b.mixed = documents() && !are_one(ids_, block_ids);
  const auto in_block = [&](int64_t key) { return key < 0 ? 0 : key < keys ? key : keys; };
  const int64_t first_seen = row0_ + t_.left_diagonal - t_.key_begin - key0, first_hidden = row0_ + t_.diagonal - t_.key_begin - key0;
  b.mask = BlockMask{first_seen, first_hidden, in_block(first_seen + rows_ - 1), in_block(first_hidden)};
  b.at_edge = b.mask.whole_begin > 0 || b.mask.whole_end < keys;
  b.split_k = false;
  const bool one_row_mask = in_.mask && in_.mask_stride == 0;
  b.visible = one_row_mask ? make_mask_words<kTileVecs>(in_, head_, b.at, scratch_.words) : Seen::kAll;
  return b.visible != Seen::kNone;
}

template <class T, class Ops>
bool BackwardWalk<T, Ops>::keys_nonfinite(int64_t begin, int64_t keys) {
  if (keys_nonfinite_ < 0) keys_nonfinite_ = any_nonfinite(k_, t_.k_stride, task_keys_, t_.headdim);
  return keys_nonfinite_ > 0 && any_nonfinite(k_ + begin * t_.k_stride, t_.k_stride, keys, t_.headdim);
}

// S^T = K Q^T and dP^T = V dO^T, while what is added to scores is fetched.
template <class T, class Ops>
void BackwardWalk<T, Ops>::multiply() {
  if (!has_pairs(in_) && !t_.has_dbias) return multiply_keys(0, block_.keys);
  const int64_t parts = (block_.keys + kFetchKeys - 1) / kFetchKeys;
  for (int64_t part = 0; part < parts; ++part) {
    prefetch_terms<T>(in_, head_, block_.at, part, parts);
    if (t_.has_dbias) dbias_.prefetch(block_.at, part, parts);
    multiply_keys(part * kFetchKeys, part + 1 < parts ? (part + 1) * kFetchKeys : block_.keys);
  }
}

// The same of keys [begin, end) of the block.
template <class T, class Ops>
void BackwardWalk<T, Ops>::multiply_keys(int64_t begin, int64_t end) {
  for_parts([&](int w, auto count) {
    constexpr int kVecs = decltype(count)::value;
    const KeyRange seen = keys_seen_by(w * kLanes, kVecs * kLanes);
    const int64_t first_key = seen.begin > begin ? seen.begin : begin, end_key = seen.end < end ? seen.end : end;
    if (first_key >= end_key) return;
    const auto from = [&](Scalars a) { return Scalars{a.data + (block_.key0 + first_key) * a.stride, a.stride}; };
    float *s = scratch_.s + first_key * kTile, *ds = scratch_.ds + first_key * kTile;
    if constexpr (kFetchesAhead) {
      next_q_.fetch(fetched_);
      next_dq_.fetch(fetched_);
      next_dq_low_.fetch(fetched_);
      next_dout_.fetch(fetched_);
    }
    product_by_row<Ops, kVecs>(from(k_rows_), end_key - first_key, scratch_.q_lanes + lane_offset(elements<Ops>(t_.headdim), w * kLanes),
                               elements<Ops>(t_.headdim), s + w * kLanes, kTile, unused_);
    product_by_row<Ops, kVecs>(from(v_rows_), end_key - first_key, scratch_.dout_lanes + lane_offset(elements<Ops>(t_.headdim_v), w * kLanes),
                               elements<Ops>(t_.headdim_v), ds + w * kLanes, kTile, unused_);
  });
}

// Which pairs count, and whether one that does not meets an Inf or NaN. False: none counts.
template <class T, class Ops>
bool BackwardWalk<T, Ops>::find_pairs() {
  Block& b = block_;
  if (in_.mask && in_.mask_stride != 0) b.visible = make_mask_words<kTileVecs>(in_, head_, b.at, scratch_.words);
  if (b.visible == Seen::kNone) return false;
  // An Inf in k times the zeros of a lane beyond the tensor is NaN.
  for (int64_t key = 0; rows_ < kTile && key < b.keys; ++key)
    for (int64_t i = rows_; i < kTile; ++i) scratch_.s[key * kTile + i] = 0;
  const bool masked = b.at_edge || in_.bias || b.visible == Seen::kSome || b.mixed;
  b.element_wise = (masked || some_without_) && (rows_nonfinite() || keys_nonfinite(b.key0, b.keys));
  return true;
}

// P and dS of the block in place of S^T and dP^T. What is added to capped scores is apart from them.
template <class T, class Ops>
void BackwardWalk<T, Ops>::weigh() {
  const Block& b = block_;
  const bool added = adds(in_), hidden = in_.bias || b.visible == Seen::kSome || b.mixed, terms = capped_ && (added || hidden);
  float* const scores = terms ? scratch_.terms : scratch_.s;
  if (terms)
    for (int64_t i = 0; i < b.keys * kTile; i += kLanes) store(scratch_.terms + i, zero());
  if (added) add_terms<kTileVecs, T>(in_, head_, b.at, capped_ ? 1.0f : static_cast<float>(scaling_.magnitude), scores, unused_);
  if (b.visible == Seen::kSome) hide_masked<kTileVecs>(scratch_.words, b.keys, scores, unused_);
  if (b.mixed) hide_documents<kTileVecs>(in_, b.at, scores, unused_);
  if (in_.dropout_below > 0) make_dropout_words<kTileVecs>(in_, head_, b.at, scratch_.words);
  gradients_of_block<Ops>(t_, scratch_, BlockKinds{hidden, terms, keeps_, b.element_wise}, b.at.key, b.keys, b.mask, lse_, delta_);
}

// -Inf for the pairs of the block that do not count: hidden by what there is, or of rows without a gradient.
template <class T, class Ops>
void BackwardWalk<T, Ops>::find_hidden() {
  const Block& b = block_;
  for (int64_t i = 0; i < b.keys * kTile; i += kLanes) store(scratch_.hidden + i, zero());
  if (in_.bias) add_terms<kTileVecs, T>(in_, head_, b.at, 1.0f, scratch_.hidden, unused_);
  if (in_.mask && make_mask_words<kTileVecs>(in_, head_, b.at, scratch_.words) != Seen::kAll)
    hide_masked<kTileVecs>(scratch_.words, b.keys, scratch_.hidden, unused_);
  if (documents()) hide_documents<kTileVecs>(in_, b.at, scratch_.hidden, unused_);
  if (b.at_edge) hide_scores<kTileVecs>(scratch_.hidden, 0, b.keys, b.mask.first_seen, b.mask.first_hidden, unused_);
  for (int64_t i = 0; i < kTile; ++i)
    for (int64_t key = 0; !has_gradient(lse_[i]) && key < b.keys; ++key) scratch_.hidden[key * kTile + i] = minus_infinity();
}

// Inf and NaN leave the operands of the three products below; codes say what they add to pairs that count.
template <class T, class Ops>
__attribute__((noinline)) void BackwardWalk<T, Ops>::look_at_pairs() {
  Block& b = block_;
  if (rows_nonfinite() && !rows_split_) split_rows();
  b.split_k = keys_nonfinite(b.key0, b.keys);
  if (b.split_k) split_nonfinite(k_ + b.key0 * t_.k_stride, t_.k_stride, b.keys, t_.headdim, true, scratch_.finite_rows, scratch_.code_rows);
  find_hidden();
  hide_and_tell_kinds(Ops{}, scratch_.hidden, b.keys, scratch_.p_rows, scratch_.ds_rows, scratch_.ds_columns, scratch_.kinds_rows,
                      scratch_.kinds_columns);
  for (int64_t i = 0; keeps_ && i < b.keys * kTile; ++i)
    if (scratch_.hidden[i] == minus_infinity()) scratch_.score_gradient[i] = 0;
}

// to[key] += of_pairs[key] columns.
template <class T, class Ops>
void BackwardWalk<T, Ops>::add_to_keys(const Element* of_pairs, const Element* columns, int headdim, float* to) const {
  const int64_t row_width = round_up(headdim, kLanes), part = block_.at_edge ? kTile / 2 : kTile;
  for (int64_t row = 0; row < rows_; row += part) {
    const KeyRange seen = keys_seen_by(row, part);
    if (seen.begin >= seen.end) continue;
    const Element* a = of_pairs + seen.begin * elements<Ops>(kTile) + row / Ops::kPair;
    product_into_wide_rows<Ops>(Scalars{reinterpret_cast<const char*>(a), elements<Ops>(kTile) * 4}, seen.end - seen.begin,
                                columns + row / Ops::kPair * copy_stride(headdim), copy_stride(headdim),
                                elements<Ops>(rows_ - row < part ? rows_ - row : part), to + seen.begin * row_width, row_width, row_width / kLanes);
  }
}
template <class T, class Ops>
void BackwardWalk<T, Ops>::add_codes_to_keys(const Element* codes, int headdim, float* to) const {
  const int64_t n = block_.keys * round_up(headdim, kLanes);
  for (int64_t i = 0; i < n; i += kLanes) store(scratch_.sums + i, zero());
  add_to_keys(scratch_.kinds_rows, codes, headdim, scratch_.sums);
  for (int64_t i = 0; i < n; i += kLanes) add_decoded(scratch_.sums + i, to + i);
}

// dV += P^T dO, dK += dS^T Q.
template <class T, class Ops>
void BackwardWalk<T, Ops>::add_block_to_keys() {
  float *const dk = scratch_.dk + block_.key0 * width_, *const dv = scratch_.dv + block_.key0 * width_v_;
  const bool split_dout = block_.element_wise && dout_nonfinite_, split_q = block_.element_wise && q_nonfinite_;
  add_to_keys(scratch_.p_rows, split_dout ? scratch_.dout_finite : scratch_.dout_columns, t_.headdim_v, dv);
  if (split_dout) add_codes_to_keys(scratch_.dout_codes, t_.headdim_v, dv);
  add_to_keys(scratch_.ds_rows, split_q ? scratch_.q_finite : scratch_.q_columns, t_.headdim, dk);
  if (split_q) add_codes_to_keys(scratch_.q_codes, t_.headdim, dk);
}

// to[d][row] += of_keys[d] of_pairs[row].
template <class T, class Ops>
void BackwardWalk<T, Ops>::add_to_rows(Scalars of_keys, const Element* of_pairs, float* to) const {
  for_parts([&](int w, auto count) {
    constexpr int kVecs = decltype(count)::value;
    const KeyRange seen = keys_seen_by(w * kLanes, kVecs * kLanes);
    if (seen.begin >= seen.end) return;
    const Scalars kc{of_keys.data + seen.begin / Ops::kPair * of_keys.stride, of_keys.stride};
    product_by_column<Ops, kVecs>(kc, t_.headdim, of_pairs + seen.begin / Ops::kPair * kTile + w * kLanes, kTile,
                                  elements<Ops>(seen.end - seen.begin), to + lane_offset(t_.headdim, w * kLanes), one_);
  });
}

// dQ^T += K^T dS^T.
template <class T, class Ops>
void BackwardWalk<T, Ops>::add_block_to_rows() {
  if (!block_.split_k)
    return add_to_rows(Scalars{k_columns_.data + block_.key0 / Ops::kPair * k_columns_.stride, k_columns_.stride}, scratch_.ds_columns, scratch_.dq);
  const auto columns_of = [&](const T* from, Element* buffer) {
    return Operand<T, Ops>::column_scalars(from, t_.headdim, block_.keys, t_.headdim, buffer);
  };
  const int64_t n = static_cast<int64_t>(t_.headdim) * kTile;
  add_to_rows(columns_of(scratch_.finite_rows, scratch_.k_finite), scratch_.ds_columns, scratch_.dq);
  for (int64_t i = 0; i < n; i += kLanes) store(scratch_.sums + i, zero());
  add_to_rows(columns_of(scratch_.code_rows, scratch_.k_codes), scratch_.kinds_columns, scratch_.sums);
  for (int64_t i = 0; i < n; i += kLanes) add_decoded(scratch_.sums + i, scratch_.dq + i);
}

}  // namespace fattn::core::FATTN_ISA
