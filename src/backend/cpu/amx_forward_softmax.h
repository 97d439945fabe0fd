// The softmax of the AMX forward kernel (amx_forward.h): which one the scores of a block need, its maximum, and what options make of the scores.
#pragma once

#include "backend/cpu/amx_forward.h"

namespace fattn::core::amx {

// The softmax that the block at `key` needs for a tile; a tile never returns to a simpler one. Rows that have seen bounded scores alone, which are
// calm, stay as they are: what is hidden from a row changes nothing of it.
template <bool kOptions>
inline auto Forward<kOptions>::choose(int64_t tile, int64_t key) -> Softmax {
  if (has_bias()) return Softmax::kWhole;
  const float of_products = norm(tile) * key_norm_ * log2_scale_;  // NaN if infinite times 0
  const float bound = bound_of_score(of_products);
  Softmax wanted = Softmax::kBounded;
  if (!(bound <= kBoundedScore && of_products <= kFiniteScore && value_bits_ < kBoundedValue) && calm_rows(tile)) {
    const auto wild = static_cast<__mmask16>(wild_rows(tile, key) & calm_rows(tile));
    if (wild) leave_bounded(tile, wild);
    calm_rows(tile) = static_cast<uint16_t>(calm_rows(tile) & ~wild);
  }
  if (calm_rows(tile) == 0xffff) return softmax(tile);
  wanted = bound <= kFiniteScore && of_products <= kFiniteScore && calm_rows(tile) == 0 ? Softmax::kOnline : Softmax::kPropagate;
  if (wanted < softmax(tile)) wanted = softmax(tile);
  return hides_ ? Softmax::kWhole : wanted;
}

// From the bound of a scaled product, in log2 units.
template <bool kOptions>
inline float Forward<kOptions>::bound_of_score(float bound) const {
  if (kOptions && options_.capped && bound > t_.softcap * kLog2E) bound = t_.softcap * kLog2E;
  if (kOptions && t_.inputs.alibi_slopes) bound += largest_slope_term();
  return bound;
}

// The rows of a tile that see a key of the block at `key` whose score may not be bounded, or whose value is large.
template <bool kOptions>
__attribute__((noinline)) __mmask16 Forward<kOptions>::wild_rows(int64_t tile, int64_t key) const {
  const TileKeys& keys = tile_keys(tile);
  const Step all{tile, key, keys.begin, keys.end - keys.begin, 0, true, true};
  const SeenKeys seen = seen_keys(all);
  const __m512 factor = _mm512_set1_ps(kNormMargin * norm(tile) * log2_scale_);
  const bool capped = kOptions && options_.capped;
  const __m512 cap = _mm512_set1_ps(capped ? t_.softcap * kLog2E : __builtin_inff());
  const __m512 added = _mm512_set1_ps(kOptions && t_.inputs.alibi_slopes ? largest_slope_term() : 0.0f);
  __mmask16 rows = 0;
  for (int64_t unit = 0; unit < all.units && rows != 0xffff; ++unit) {
    uint32_t wild = value_bits_ >= kBoundedValue ? wild_values(keys.begin + unit) : 0;
    for (int half = 0; half < 2; ++half) {
      const __m512 squares = _mm512_load_ps(key_squares(keys.begin + unit) + half * kLanes);
      const __m512 product = _mm512_mul_ps(_mm512_sqrt_ps(squares), factor), bound = _mm512_add_ps(_mm512_min_ps(product, cap), added);
      const __mmask16 calm = _mm512_cmp_ps_mask(squares, _mm512_set1_ps(kFiniteSquares), _CMP_LE_OQ) &
                             _mm512_cmp_ps_mask(product, _mm512_set1_ps(kFiniteScore), _CMP_LE_OQ) &
                             _mm512_cmp_ps_mask(bound, _mm512_set1_ps(kBoundedScore), _CMP_LE_OQ);
      wild |= static_cast<uint32_t>(static_cast<__mmask16>(~calm)) << 16 * half;
    }
    if (wild) rows |= _mm512_test_epi32_mask(allowed(all, seen, unit), _mm512_set1_epi32(static_cast<int>(wild)));
  }
  return rows;
}

// A bound of what ALiBi takes from the task's scores, in log2 units.
template <bool kOptions>
inline float Forward<kOptions>::largest_slope_term() const {
  const int64_t shift = t_.inputs.shift < 0 ? -t_.inputs.shift : t_.inputs.shift;
  return __builtin_fabsf(t_.inputs.alibi_slopes[0]) * static_cast<float>(t_.row_end + shift + t_.seqlen_k) * kLog2E;
}

template <bool kOptions>
inline auto Forward<kOptions>::with_calm_rows(int64_t tile) const -> Softmax {
  const Softmax kind = softmax(tile);
  if (kind == Softmax::kBounded || calm_rows(tile) == 0) return kind;
  return kind == Softmax::kWhole ? Softmax::kWholeSome : Softmax::kPropagateSome;
}

// Of these rows, those that have seen a key are shifted by 0, the others by nothing yet.
template <bool kOptions>
inline void Forward<kOptions>::leave_bounded(int64_t tile, __mmask16 rows) {
  const __mmask16 seen = _mm512_cmp_ps_mask(_mm512_load_ps(sum(tile)), _mm512_setzero_ps(), _CMP_GT_OQ);
  _mm512_mask_store_ps(max(tile), rows, _mm512_mask_blend_ps(seen, _mm512_set1_ps(kMinusInfinity), _mm512_setzero_ps()));
}

// Raises the maximum of a tile if the step's scores exceed it by much, and rescales what was summed so far: all earlier
// products must be in memory, so they are finished first. known: `largest` has the largest scores already.
template <bool kOptions>
template <Softmax kind>
inline void Forward<kOptions>::raise_max(const Step& step, bool known, __m512 largest, ProductStream& product) {
  const int64_t tile = step.tile;
  const __m512 none = _mm512_set1_ps(kMinusInfinity), old = _mm512_load_ps(max(tile));
  const float to_log2 = has_whole_scores(kind) ? exponent_ : 1.0f / kFixed;
  const float lazy = has_whole_scores(kind) ? lazy_score() : kLazy;
  const __m512 block = has_whole_scores(kind) ? largest : _mm512_mul_ps(known ? largest : largest_of(step), fixed_scale_);
  auto raises = _mm512_cmp_ps_mask(block, _mm512_add_ps(old, _mm512_set1_ps(lazy)), _CMP_GT_OQ);  // a row by its own scores alone
  if (is_for_some(kind)) raises = static_cast<__mmask16>(raises & ~calm_rows(tile));
  if (!raises) return;
  product.finish();
  const __m512 raised = _mm512_mask_mov_ps(old, raises, block);
  _mm512_store_ps(max(tile), raised);
  // Rows without a key so far have nothing to scale, and -inf - -inf would be NaN.
  const __mmask16 seen = _mm512_cmp_ps_mask(old, none, _CMP_NEQ_UQ);
  const __m512 factor = exp2_accurate(_mm512_mul_ps(_mm512_maskz_sub_ps(seen, old, raised), _mm512_set1_ps(to_log2)));
  _mm512_store_ps(sum(tile), _mm512_mul_ps(_mm512_load_ps(sum(tile)), factor));
  _mm512_store_ps(sum_of_rounded(tile), _mm512_mul_ps(_mm512_load_ps(sum_of_rounded(tile)), factor));
  float* o = reinterpret_cast<float*>(acc(tile));
  for (int64_t i = 0; i < at_.values * 16; ++i) _mm512_store_ps(o + i * kLanes, _mm512_mul_ps(_mm512_load_ps(o + i * kLanes), factor));
  memory_barrier();
}

// The options' scores of a step, in place. Pairs that are hidden become -inf, where options may hide pairs (not of bounded scores); then, or where
// all rows see the whole step, the result is the largest of each row.
template <bool kOptions>
__attribute__((noinline)) __m512 Forward<kOptions>::reshape(const Step& step) const {
  const TileKeys& keys = tile_keys(step.tile);
  const vec::TilePlace at = place_of(step.tile, step.key, step.unit, step.unit + step.units);
  float* s = reinterpret_cast<float*>(scores(step.parity));
  __m512 largest;
  const __m512 none = _mm512_set1_ps(kMinusInfinity);
  bool known = false;  // is the largest that of the scores as they are?
  const auto restart = [&] {
    largest = none;
    known = true;
  };
  if (options_.capped) {
    restart();
    vec::cap_scores<1>(vec::CappedScore(static_cast<double>(options_.scale), t_.softcap), s, at.keys, &largest);
  }
  if (options_.added) {
    restart();
    vec::add_terms<1, vec::bf16>(t_.inputs, 0, at, options_.capped ? 1.0f : options_.scale, s, &largest);
  }
  const bool bounded = softmax(step.tile) == Softmax::kBounded;
  if (keys.hidden && !bounded) {
    restart();
    vec::hide_masked<1>(mask_words(step.tile) + step.unit * kLanes, at.keys, s, &largest);
  }
  if (keys.mixed && !bounded) {
    restart();
    vec::hide_documents<1>(t_.inputs, at, s, &largest);
  }
  if (!hides_ || bounded || (known && is_whole(step))) return largest;
  largest = none;
  const SeenKeys seen = seen_keys(step);
  const int64_t begin = whole_begin(step), end = whole_end(step);
  for (int64_t unit = 0; unit < step.units; ++unit, s += kUnit * kLanes) {
    const bool whole = unit * kUnit >= begin && (unit + 1) * kUnit <= end;
    const __m512i words = seen.words(unit * kUnit);
    for (int r = 0; r < kUnit; ++r) {
      __m512 x = _mm512_load_ps(s + r * kLanes);
      if (!whole) {
        x = _mm512_mask_mov_ps(none, sees(words, r), x);
        _mm512_store_ps(s + r * kLanes, x);
      }
      largest = _mm512_max_ps(x, largest);
    }
  }
  return largest;
}

// The largest product of each row of a step among the keys that it sees.
template <bool kOptions>
inline __m512 Forward<kOptions>::largest_of(const Step& step) const {
  const float* s = reinterpret_cast<const float*>(scores(step.parity));
  const __m512 none = _mm512_set1_ps(kMinusInfinity);
  __m512 a = none, b = none;
  if (is_whole(step)) {
    for (int64_t r = 0; r < step.units * kUnit; r += 2) {
      a = _mm512_max_ps(_mm512_load_ps(s + r * kLanes), a);
      b = _mm512_max_ps(_mm512_load_ps(s + (r + 1) * kLanes), b);
    }
    return _mm512_max_ps(a, b);
  }
  const SeenKeys seen = seen_keys(step);
  for (int64_t unit = 0; unit < step.units; ++unit, s += kUnit * kLanes) {
    const __m512i words = seen.words(unit * kUnit);
    for (int r = 0; r < kUnit; ++r) a = _mm512_mask_max_ps(a, sees(words, r), _mm512_load_ps(s + r * kLanes), a);
  }
  return a;
}

}  // namespace fattn::core::amx
