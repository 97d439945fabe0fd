// The weights of the AMX forward kernel (amx_forward.h): P^T = exp2(S^T - max) and their sums, with portions of AMX work between them.
#pragma once

#include "backend/cpu/amx_forward.h"

namespace fattn::core::amx {

// Weight of a vector of scores.
template <bool kOptions>
template <Softmax kind>
FATTN_AMX_INLINE_MEMBER __m512 Forward<kOptions>::weight(__m512 s, __m512 scale, __m512 shift, __mmask16 calm) {
  if (kind == Softmax::kBounded) return exp2_of_product(s, scale);
  const __m512 u = has_whole_scores(kind) ? _mm512_mul_ps(_mm512_sub_ps(s, shift), scale) : _mm512_fmsub_ps(s, scale, shift);
  const __m512 w = exp2_fixed(u);
  if (kind == Softmax::kOnline) return w;
  __m512 or_nan = _mm512_mask_mov_ps(w, _mm512_cmp_ps_mask(u, u, _CMP_UNORD_Q), u);
  if (is_for_some(kind)) or_nan = _mm512_mask_mov_ps(or_nan, calm, exp2_of_product(s, scale));
  // (With a scale of 0, u of a hidden score is NaN.)
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(has_whole_scores(kind) ? s : u, _mm512_set1_ps(kMinusInfinity), _CMP_NEQ_UQ), or_nan);
}

// Weights of one unit, rows [begin, begin + 4) of both accumulators, of pairs that are `seen` if `masked`. `words` are those of its first key's
// block of random numbers, turned so that bit 0 is that key's.
template <bool kOptions>
template <Softmax kind, bool masked, bool drops>
FATTN_AMX_INLINE_MEMBER void Forward<kOptions>::weigh_rows(const float* s, char* p, int begin, __m512 scale, __m512 shift, __mmask16 calm,
                                                           const __m512i& seen, const __m512i (&words)[4], Sums& sums) {
#pragma GCC unroll 4
  for (int r = begin; r < begin + 4; ++r) {
    __m512 a = weight<kind>(_mm512_load_ps(s + r * kLanes), scale, shift, calm);
    __m512 b = weight<kind>(_mm512_load_ps(s + (16 + r) * kLanes), scale, shift, calm);
    if (masked) {
      a = _mm512_maskz_mov_ps(sees(seen, r), a);
      b = _mm512_maskz_mov_ps(sees(seen, 16 + r), b);
    }
    sums.exact[0] = _mm512_add_ps(sums.exact[0], a);
    sums.exact[1] = _mm512_add_ps(sums.exact[1], b);
    __m512i both = pair_bf16(a, b);
    sums.rounded = add_pairs(sums.rounded, both);
    if (drops) {
      a = _mm512_maskz_mov_ps(_mm512_test_epi32_mask(words[r % 8 / 2], _mm512_set1_epi32(1 << dropout_bit(0, r))), a);
      b = _mm512_maskz_mov_ps(_mm512_test_epi32_mask(words[r % 8 / 2], _mm512_set1_epi32(1 << dropout_bit(0, 16 + r))), b);
      both = pair_bf16(a, b);
    }
    store_row(p, r, both);
  }
}

// One unit of weights with portions of AMX work between its quarters.
template <bool kOptions>
template <Softmax kind, bool masked, bool drops, int kDepth, int kGroups>
FATTN_AMX_INLINE_MEMBER void Forward<kOptions>::weigh_unit(const float* s, char* p, __m512 scale, __m512 shift, __mmask16 calm, const __m512i& seen,
                                                           const __m512i (&words)[4], Sums& sums, ScoreStream<kDepth>& next,
                                                           ProductStream& product) const {
  const int64_t depth = next.depth(), groups = kGroups ? kGroups : at_.groups;
#pragma GCC unroll 4
  for (int quarter = 0; quarter < 4; ++quarter) {
    for (int64_t i = (quarter * groups + 3) / 4; i < ((quarter + 1) * groups + 3) / 4; ++i) product.portion();
    weigh_rows<kind, masked, drops>(s, p, quarter * 4, scale, shift, calm, seen, words, sums);
    if (next.units > 0 && quarter * depth / 4 < (quarter + 1) * depth / 4) next.portion(quarter * depth / 4, (quarter + 1) * depth / 4);
  }
}

template <bool kOptions>
template <Softmax kind, int kDepth, int kGroups>
inline void Forward<kOptions>::weigh(const Step& step, const ScoreStream<kDepth>& next, const ProductStream& product) {
  if constexpr (kOptions) {
    if (options_.drops) return weigh<kind, true, kDepth, kGroups>(step, next, product);
  }
  weigh<kind, false, kDepth, kGroups>(step, next, product);
}

// Weights and sums of a tile in the block at `key`, with the scores of the next and the product of the previous tile.
template <bool kOptions>
template <Softmax kind, bool drops, int kDepth, int kGroups>
__attribute__((noinline)) void Forward<kOptions>::weigh(const Step& step, ScoreStream<kDepth> next, ProductStream product) {
  const int64_t tile = step.tile;
  product.start();
  __m512 largest = _mm512_setzero_ps();
  bool known = false;
  if constexpr (kOptions) {
    if (reshapes(step) || drops) product.finish();  // which AMX goes on with meanwhile
    if (reshapes(step)) {
      largest = reshape(step);
      known = is_whole(step);
    }
    if (drops) vec::make_dropout_words<1>(t_.inputs, 0, place_of(tile, step.key, step.unit, step.unit + step.units), dropout_words());
  }
  if (kind != Softmax::kBounded) raise_max<kind>(step, known, largest, product);
  const float* s = reinterpret_cast<const float*>(scores(step.parity));
  char* p = weights(step.parity);
  __m512 shift = _mm512_load_ps(max(tile));
  if (kind != Softmax::kBounded)  // a row without a key has no maximum: its scores are all -inf or not visible
    shift = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(shift, _mm512_set1_ps(kMinusInfinity), _CMP_NEQ_UQ), shift);
  const __m512 scale = fixed_scale_;
  const __mmask16 calm = is_for_some(kind) ? calm_rows(tile) : __mmask16{0};
  Sums sums{{_mm512_load_ps(sum(tile)), _mm512_setzero_ps()}, _mm512_load_ps(sum_of_rounded(tile))};
  // Units that all rows see whole. (kWhole has hidden what they do not.)
  int64_t begin = 0, end = step.units;
  if (!has_whole_scores(kind)) {
    begin = ceil_div(whole_begin(step), kUnit);
    end = whole_end(step) / kUnit;
  }
  if (kOptions && kind == Softmax::kBounded && (tile_keys(tile).hidden || tile_keys(tile).mixed)) end = begin;  // none is known to be
  SeenKeys seen{};
  if (begin > 0 || end < step.units) seen = seen_keys(step);
  __m512i words[4] = {};
  for (int64_t unit = 0; unit < step.units; ++unit, s += 2 * kTileBytes / 4, p += kTileBytes) {
    if constexpr (drops) {
      const int64_t first = step.key + step.unit * kUnit, key = first + unit * kUnit;
      const uint32_t* of_unit = dropout_words() + vec::dropout_word(first, key) * kLanes;
      for (int i = 0; i < 4; ++i) words[i] = _mm512_srli_epi32(_mm512_loadu_si512(of_unit + i * kLanes), static_cast<unsigned>(dropout_bit(0, key)));
    }
    const bool whole = unit >= begin && unit < end;
    const __m512i of_unit = whole ? _mm512_set1_epi32(-1) : visible(step, seen, unit);
    if (whole || sees_all(of_unit))
      weigh_unit<kind, false, drops, kDepth, kGroups>(s, p, scale, shift, calm, of_unit, words, sums, next, product);
    else
      weigh_unit<kind, true, drops, kDepth, kGroups>(s, p, scale, shift, calm, of_unit, words, sums, next, product);
  }
  _mm512_store_ps(sum(tile), _mm512_add_ps(sums.exact[0], sums.exact[1]));
  _mm512_store_ps(sum_of_rounded(tile), sums.rounded);
  next.finish();
  product.finish();
  memory_barrier();
}

}  // namespace fattn::core::amx
