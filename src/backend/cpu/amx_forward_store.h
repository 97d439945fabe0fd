// What leaves the AMX forward kernel (amx_forward.h): o = O / sum and lse, and what Inf and NaN in values add to O.
#pragma once

#include "backend/cpu/amx_forward.h"

namespace fattn::core::amx {

// What the Inf and NaN that left V add to a tile's accumulators, which are in memory.
template <bool kOptions>
__attribute__((noinline)) void Forward<kOptions>::add_nonfinite(const Step& step) {
  float* const o = reinterpret_cast<float*>(acc(step.tile));
  const SeenKeys seen = seen_keys(step);
  const auto words_of = [&](int64_t unit) {
    const __m512i words = allowed(step, seen, unit);
    return has_bias() ? without_hidden_by_bias(t_, 0, place_of(step.tile, step.key, step.unit + unit, step.unit + unit + 1), words) : words;
  };
  alignas(64) char kinds[kMostCodeSquares][kTileBytes];
  int64_t units[kMostCodeSquares];
  for (int64_t unit = 0; unit < step.units;) {
    int64_t n = 0;
    for (; unit < step.units && n < kMostCodeSquares; ++unit) {
      const uint32_t marked = marks(step.unit + unit);
      if (marked == 0) continue;
      const __m512i words = words_of(unit);
      if (_mm512_test_epi32_mask(words, _mm512_set1_epi32(static_cast<int>(marked))) == 0) continue;
      const char* p = weights(step.parity) + unit * kTileBytes;
      for (int r = 0; r < 16; ++r) store_row(kinds[n], r, kinds_of(_mm512_load_si512(p + r * kTileRow), sees(words, r), sees(words, 16 + r)));
      units[n++] = step.unit + unit;
    }
    if (n == 0 || all_nan(o, at_.values * kLanes)) continue;
    memory_barrier();
    for (int64_t i = 0; i < at_.values; ++i) {
      bool any = false;
      for (int64_t j = 0; j < n; ++j) any |= is_coded(units[j], i) != 0;
      if (!any) continue;
      alignas(64) float sums[kLanes * kLanes];
      FATTN_TILE_ZERO(0);
      for (int64_t j = 0; j < n; ++j) {
        FATTN_TILE_LOAD(6, kinds[j], kTileRow);
        FATTN_TILE_LOAD(7, scratch_ + at_.codes + units[j] * value_stride() + i * kTileBytes, kTileRow);
        FATTN_TILE_DOT(0, 7, 6);
      }
      FATTN_TILE_STORE(0, sums, kTileRow);
      memory_barrier();
      for (int64_t r = 0; r < kLanes; ++r) vec::add_decoded(sums + r * kLanes, o + (i * kLanes + r) * kLanes);
    }
    memory_barrier();
  }
}

// Normalises a tile, transposes it back and stores its rows and their lse.
template <bool kOptions>
inline void Forward<kOptions>::store_tile(int64_t tile) {
  const int64_t row = first_row(tile), rows = min_of(kLanes, t_.row_end - row);
  if (t_.inputs.sink) add_sink(tile);
  const __m512 total = _mm512_load_ps(sum(tile));
  const __mmask16 seen = _mm512_cmp_ps_mask(total, _mm512_setzero_ps(), _CMP_NEQ_UQ);
  // A NaN among the weights is sure to be in their own sum only: rounding may make a number of it.
  const __m512 divisor = _mm512_mask_mov_ps(_mm512_load_ps(sum_of_rounded(tile)), _mm512_cmp_ps_mask(total, total, _CMP_UNORD_Q), total);
  const __m512 inverse = _mm512_maskz_div_ps(seen, _mm512_set1_ps(kOptions ? t_.inputs.dropout_scale : 1.0f), divisor);
  uint16_t* const o = static_cast<uint16_t*>(t_.o) + (t_.fp32_out ? 0 : row * t_.o_stride);
  float* const wide_o = static_cast<float*>(t_.o) + (t_.fp32_out ? row * t_.o_stride : 0);
  const float* from = reinterpret_cast<const float*>(acc(tile));
  for (int64_t d = 0; d < t_.headdim_v; d += 16, from += 16 * kLanes) {
    __m512i x[16];
    for (int i = 0; i < 16; ++i) x[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(from + i * kLanes), inverse));
    transpose16(x);
    const __mmask16 lanes = first_lanes16(t_.headdim_v - d);
    for (int64_t r = 0; r < rows; ++r) {
      if (t_.fp32_out)
        _mm512_mask_storeu_ps(wide_o + r * t_.o_stride + d, lanes, _mm512_castsi512_ps(x[r]));
      else
        _mm256_mask_storeu_epi16(o + r * t_.o_stride + d, lanes, to_bf16(_mm512_castsi512_ps(x[r])));
    }
  }
  if (!t_.lse) return;
  __m512 shift = _mm512_mul_ps(_mm512_load_ps(max(tile)), _mm512_set1_ps(softmax(tile) == Softmax::kWhole ? options_.left() : kLn2 / kFixed));
  shift = _mm512_maskz_mov_ps(seen, shift);  // the logarithm of 0 says -inf already
  alignas(64) float lse[kLanes];
  _mm512_store_ps(lse, _mm512_add_ps(shift, log_accurate(total)));
  for (int64_t r = 0; r < rows; ++r) {
    const bool is_sink = t_.inputs.sink && (sum(tile)[r] == 0 || sum(tile)[r] >= vec::kGreatestSink);
    t_.lse[(row + r) * t_.lse_stride] = is_sink ? *t_.inputs.sink : lse[r];
  }
}

// To the sums of rows that have weights.
template <bool kOptions>
inline void Forward<kOptions>::add_sink(int64_t tile) {
  const double unit = static_cast<double>(softmax(tile) == Softmax::kWhole ? options_.left() : kLn2 / kFixed);
  for (int64_t r = 0; r < kLanes; ++r) {
    if (sum(tile)[r] == 0) continue;
    const float weight = vec::weight_of_sink(*t_.inputs.sink, static_cast<double>(max(tile)[r]) * unit);
    sum(tile)[r] += weight;
    sum_of_rounded(tile)[r] += weight;
  }
}

}  // namespace fattn::core::amx
