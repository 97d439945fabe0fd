// Queries and keys of the AMX forward kernel (amx_forward.h): packed for tiles, and what each query tile computes of a block of keys.
#pragma once

#include "backend/cpu/amx_forward.h"

namespace fattn::core::amx {

template <bool kOptions>
inline void Forward<kOptions>::load_queries() {
  const uint16_t* q = static_cast<const uint16_t*>(t_.q);
  for (int64_t tile = 0; tile < at_.tiles; ++tile) {
    const int64_t row = first_row(tile);
    const __m512 squares = pack_transposed(q + row * t_.q_stride, t_.q_stride, min_of(kLanes, t_.row_end - row), t_.headdim,
                                           t_.scale < 0 ? 0x80008000u : 0u, scratch_ + at_.q + tile * at_.depth * kTileBytes);
    norm(tile) = largest_norm(squares);
    softmax(tile) = has_bias() ? Softmax::kWhole : Softmax::kBounded;
    calm_rows(tile) = has_bias() ? 0 : 0xffff;
    _mm512_store_ps(sum(tile), _mm512_setzero_ps());
    _mm512_store_ps(sum_of_rounded(tile), _mm512_setzero_ps());
    _mm512_store_ps(max(tile), _mm512_set1_ps(has_bias() ? kMinusInfinity : 0.0f));
    for (int64_t r = 0; r < at_.values * 16; ++r) store_row(acc(tile), r, _mm512_setzero_si512());
  }
  const int64_t packed = ceil_div(t_.headdim_v, 32) * 2;  // the d tiles of V that load_keys writes; the rest of a group stays zero
  for (int64_t unit = 0; unit < at_.units; ++unit)
    for (int64_t r = packed * 16; r < at_.values * 16; ++r) store_row(scratch_ + at_.v + unit * value_stride(), r, _mm512_setzero_si512());
}

// What each tile computes of the block at `key`; the hull of that.
template <bool kOptions>
inline auto Forward<kOptions>::place_tiles(int64_t key) -> TileKeys {
  TileKeys all{at_.units, 0, false, false};
  for (int64_t tile = 0; tile < at_.tiles; ++tile) {
    int64_t begin = seen_begin(tile, key), end = seen_end(tile, key);
    TileKeys keys{0, 0, false, false};
    if (kOptions && options_.documents && begin < end) keys.mixed = narrow_to_documents(tile, key, begin, end);
    if (begin < end) {
      keys.begin = begin / kUnit;
      keys.end = ceil_div(end, kUnit);
    }
    if (kOptions && options_.masked && keys.begin < keys.end) narrow_to_mask(tile, key, keys);
    if (keys.begin < keys.end) {
      all.begin = min_of(all.begin, keys.begin);
      all.end = max_of(all.end, keys.end);
    }
    tile_keys(tile) = keys;
  }
  return all;
}

template <bool kOptions>
inline vec::TilePlace Forward<kOptions>::place_of(int64_t tile, int64_t key, int64_t begin_unit, int64_t end_unit) const {
  const int64_t begin = begin_unit * kUnit;
  return {first_row(tile), last_row(tile) + 1 - first_row(tile), key + begin, min_of(end_unit * kUnit, block_keys_) - begin};
}

// From the first to the last key of the block that may be of a tile's documents. Are they of several?
template <bool kOptions>
inline bool Forward<kOptions>::narrow_to_documents(int64_t tile, int64_t key, int64_t& begin, int64_t& end) const {
  const int32_t* ids = t_.inputs.document_k + key;
  const vec::IdRange rows = vec::ids_of(t_.inputs.document_q, first_row(tile), last_row(tile) + 1);
  const vec::KeyRange some = vec::keys_of(rows, ids, begin, end);
  begin = some.begin;
  end = some.end;
  return begin < end && !vec::are_one(rows, vec::ids_of(ids, begin / kUnit * kUnit, min_of(ceil_div(end, kUnit) * kUnit, block_keys_)));
}

// Without the units at either end that the mask hides from all rows.
template <bool kOptions>
inline void Forward<kOptions>::narrow_to_mask(int64_t tile, int64_t key, TileKeys& keys) const {
  uint32_t* words = mask_words(tile);
  keys.hidden = vec::make_mask_words<1>(t_.inputs, 0, place_of(tile, key, keys.begin, keys.end), words + keys.begin * kLanes) != vec::Seen::kAll;
  while (keys.begin < keys.end && is_dead(words + keys.begin * kLanes)) ++keys.begin;
  while (keys.begin < keys.end && is_dead(words + (keys.end - 1) * kLanes)) --keys.end;
}

// Of the block at `key` what tiles compute.
template <bool kOptions>
inline void Forward<kOptions>::load_keys(int64_t key, const TileKeys& all) {
  const auto k = vec::KeyRows<uint16_t>::keys(t_), v = vec::KeyRows<uint16_t>::values(t_);
  uint16_t* const paged = reinterpret_cast<uint16_t*>(scratch_ + at_.paged);
  __m512 squares = _mm512_setzero_ps();
  bool finite = true;
  __m512i magnitude = _mm512_setzero_si512();
  for (int64_t unit = all.begin; unit < all.end; ++unit) {
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t at = unit * kUnit + half * kLanes;
      const int64_t rows = min_of(kLanes, block_keys_ - at);
      const vec::Rows<uint16_t> from = k.side_by_side(key + at, rows, t_.headdim, paged);
      const __m512 x = pack_rows(from.data, from.stride, rows, t_.headdim, scratch_ + at_.k + (unit * 2 + half) * at_.depth * kTileBytes);
      finite &= _mm512_cmp_ps_mask(x, _mm512_set1_ps(kFiniteSquares), _CMP_NLE_UQ) == 0;
      _mm512_store_ps(key_squares(unit) + half * kLanes, x);
      squares = _mm512_max_ps(squares, x);
    }
    const int64_t at = unit * kUnit;
    const int64_t rows = min_of(kUnit, block_keys_ - at);
    const vec::Rows<uint16_t> from = v.side_by_side(key + at, rows, t_.headdim_v, paged);
    magnitude =
        _mm512_max_epu16(magnitude, pack_transposed_rows(from.data, from.stride, rows, t_.headdim_v, scratch_ + at_.v + unit * value_stride()));
  }
  key_norm_ = finite ? largest_norm(squares) : __builtin_inff();
  value_bits_ = largest_epu16(magnitude);
  split_ = false;
  if (value_bits_ >= kBoundedValue) look_at_values(key, all);
  memory_barrier();
}

// Of large values, which keys have them. Those that are not finite leave V where some pair is hidden: 0 * inf is NaN.
template <bool kOptions>
__attribute__((noinline)) void Forward<kOptions>::look_at_values(int64_t key, const TileKeys& all) {
  for (int64_t tile = 0; tile < at_.tiles && value_bits_ >= kInfinityBits; ++tile) split_ |= hides_pairs(tile, key);
  for (int64_t unit = all.begin; unit < all.end; ++unit) {
    __mmask32 wild = 0, coded = 0;
    for (int64_t i = 0; i < at_.values; ++i) {
      char* const tile = scratch_ + at_.v + unit * value_stride() + i * kTileBytes;
      wild |= elements_from(tile, kBoundedValue);
      if (!split_) continue;
      const __mmask32 elements = split_tile(tile, scratch_ + at_.codes + unit * value_stride() + i * kTileBytes, false);
      is_coded(unit, i) = elements != 0;
      coded |= elements;
    }
    wild_values(unit) = in_order(wild);
    marks(unit) = in_order(coded);
  }
}

// May pairs of the block at `key` and a tile, or of its units there, be hidden?
template <bool kOptions>
inline bool Forward<kOptions>::hides_pairs(int64_t tile, int64_t key) const {
  const TileKeys& keys = tile_keys(tile);
  return keys.begin < keys.end &&
         (hides_ || whole_end(tile, key) < min_of(keys.end * kUnit, block_keys_) || whole_begin(tile, key) > keys.begin * kUnit);
}

// Keys of a step that each row of its tile sees, and those that all see: [begin, end).
template <bool kOptions>
inline SeenKeys Forward<kOptions>::seen_keys(const Step& step) const {
  alignas(64) int32_t begins[kLanes], ends[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) {
    const int64_t row = min_of(first_row(step.tile) + i, t_.row_end - 1), skipped = step.unit * kUnit;
    const int64_t begin = in_block(first_key(row), step.key), end = in_block(limit(row), step.key);
    begins[i] = static_cast<int32_t>(begin - skipped);
    ends[i] = static_cast<int32_t>(end - skipped);
  }
  return {_mm512_load_si512(begins), _mm512_load_si512(ends)};
}

// The same of any scores.
template <bool kOptions>
inline __m512i Forward<kOptions>::allowed(const Step& step, const SeenKeys& seen, int64_t unit) const {
  __m512i words = seen.words(unit * kUnit);
  const TileKeys& keys = tile_keys(step.tile);
  if (!kOptions) return words;
  if (keys.hidden) words = _mm512_and_si512(words, _mm512_loadu_si512(mask_words(step.tile) + (step.unit + unit) * kLanes));
  if (keys.mixed) {
    const int64_t row = first_row(step.tile), rows = last_row(step.tile) + 1 - row, key = (step.unit + unit) * kUnit;
    const int64_t n = min_of(kUnit, block_keys_ - key);
    const int32_t *of_rows = t_.inputs.document_q + row, *of_keys = t_.inputs.document_k + step.key + key;
    if (!vec::are_one(vec::ids_of(of_rows, 0, rows), vec::ids_of(of_keys, 0, n)))
      words = _mm512_and_si512(words, words_of_documents(vec::load_ids(of_rows, rows), of_keys, n));
  }
  return words;
}

}  // namespace fattn::core::amx
