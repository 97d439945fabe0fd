// A square of 32 keys and 32 rows of the AMX backward kernel (amx_backward.h): P^T = exp2(S^T - lse), dS^T = P^T (dP^T - delta).
#pragma once

#include "backend/cpu/amx_backward.h"

namespace fattn::core::amx {

// P and dS of square `keys` of the task's keys (`c` of the panel) and square r of the rows, and the bias's gradient. False if a mask or documents
// hide all of it. `whole`: all rows see all keys, as far as their places go.
template <bool kOptions>
inline bool Backward<kOptions>::compute_square(int64_t keys, int64_t c, int64_t r, bool whole, bool split) {
  SquareOptions with{};
  const vec::TilePlace at{row_ + r * kSide, min_of(kSide, rows_ - r * kSide), t_.key_begin + keys * kSide,
                          min_of(kSide, t_.key_end - t_.key_begin - keys * kSide)};
  if constexpr (kOptions) {
    if (options_.masked) {
      const vec::Seen seen = vec::make_mask_words<2>(t_.inputs, head_, at, mask_words());
      if (seen == vec::Seen::kNone) return false;
      with.masked = seen == vec::Seen::kSome;
    }
    if (options_.documents) {
      const vec::IdRange of_rows = ids_of_rows(at.row, at.rows), of_keys = ids_of_keys(keys * kSide, keys * kSide + at.keys);
      if (!vec::may_meet(of_rows, of_keys)) return false;
      with.mixed = !vec::are_one(of_rows, of_keys);
    }
    with.whole = whole;
    with.split = split;
    prefetch_inputs(keys, r);
  }
  if (split)
    for (int q = 0; q < 2; ++q) seen_words(c, r)[q] = counting_words_of_square(at, keys, r, q, with);
  multiply_square(tile(at_.k, keys * 2 * at_.depth), tile(at_.q, r * 2 * at_.depth), at_.depth, tile(at_.s, 0));
  multiply_square(tile(at_.v, keys * 2 * at_.depth_v), tile(at_.dout, r * 2 * at_.depth_v), at_.depth_v, tile(at_.dp, 0));
  memory_barrier();
  if constexpr (kOptions)
    weigh_with_options(at, keys, c, r, with);
  else if (whole)
    weigh_square<false>(keys, c, r);
  else
    weigh_square<true>(keys, c, r);
  memory_barrier();
  return true;
}

// Fetches what options read and write of the square of rows after square r, in the next panel after the last one.
template <bool kOptions>
inline void Backward<kOptions>::prefetch_inputs(int64_t keys, int64_t r) const {
  const bool below = (r + 1) * kSide < rows_;
  const int64_t row = below ? r + 1 : 0, key = t_.key_begin + (keys + (below ? 0 : at_.panel)) * kSide;
  const vec::TilePlace next{row_ + row * kSide, min_of(kSide, rows_ - row * kSide), key, min_of(kSide, t_.key_end - key)};
  if (vec::has_pairs(t_.inputs)) vec::prefetch_terms<vec::bf16>(t_.inputs, head_, next, 0, 1);
  if (t_.has_dbias) bias_gradient().prefetch(next, 0, 1);
}

// dS of the keys row, row + 16 and of the two halves of the rows, to be cut to bf16: in pairs of rows, and in pairs of keys.
template <bool kOptions>
FATTN_AMX_INLINE_MEMBER void Backward<kOptions>::store_gradients(char* ds, char* ds_keys, int row, const __m512i (&rounded)[2][2]) {
  for (int i = 0; i < 2; ++i) {
    store_row(ds + i * kTileBytes, row, _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(rounded[i][0], 16), rounded[i][1]));
    store_row(ds_keys + i * kTileBytes, row, _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(rounded[0][i], 16), rounded[1][i]));
  }
}

// P and dS of 32 keys (square `keys` of the task, `c` of the panel) and 32 rows (square r of the block).
template <bool kOptions>
template <bool masked>
inline void Backward<kOptions>::weigh_square(int64_t keys, int64_t c, int64_t r) {
  const float *s = values(at_.s, 0), *dp = values(at_.dp, 0);
  char *p = tile(at_.p, (c * kSquares + r) * 2), *ds = tile(at_.ds, (c * kSquares + r) * 2), *ds_keys = tile(at_.ds_keys, (c * kSquares + r) * 2);
  const __m512 scale = _mm512_set1_ps(log2_scale_ * kFixed), nan = _mm512_set1_ps(__builtin_nanf(""));
  const __m512 lse[2] = {_mm512_load_ps(lse_ + r * kSide), _mm512_load_ps(lse_ + r * kSide + 16)};
  const __m512 delta[2] = {_mm512_load_ps(delta_ + r * kSide), _mm512_load_ps(delta_ + r * kSide + 16)};
  const __m512i skipped = _mm512_set1_epi32(static_cast<int>(keys * kSide)), half = _mm512_set1_epi32(0x8000);
  const __m512i visible[2] = {_mm512_sub_epi32(_mm512_load_si512(visible_ + r * kSide), skipped),
                              _mm512_sub_epi32(_mm512_load_si512(visible_ + r * kSide + 16), skipped)};
  for (int row = 0; row < 16; ++row) {
    __m512i rounded[2][2];  // dS of the keys row, row + 16 and of the two halves of the rows
#pragma GCC unroll 2
    for (int key = 0; key < 2; ++key) {
      __m512 w[2];
#pragma GCC unroll 2
      for (int q = 0; q < 2; ++q) {
        const int at = (key * 16 + row) * 32 + q * 16;
        const __m512 u = _mm512_fmsub_ps(_mm512_load_ps(s + at), scale, lse[q]);
        w[q] = _mm512_mask_mov_ps(exp2_coarse(u), _mm512_cmp_ps_mask(u, u, _CMP_UNORD_Q), nan);
        __m512 x = _mm512_mul_ps(w[q], _mm512_sub_ps(_mm512_load_ps(dp + at), delta[q]));
        if (masked) {
          const __mmask16 sees = _mm512_cmpgt_epi32_mask(visible[q], _mm512_set1_epi32(key * 16 + row));
          w[q] = _mm512_maskz_mov_ps(sees, w[q]);
          x = _mm512_maskz_mov_ps(sees, x);
        }
        rounded[key][q] = _mm512_add_epi32(_mm512_castps_si512(x), half);
      }
      store_row(p + key * kTileBytes, row, pair_bf16(w[0], w[1]));
    }
    store_gradients(ds, ds_keys, row, rounded);
  }
}

// P and dS with options.
template <bool kOptions>
inline void Backward<kOptions>::weigh_with_options(const vec::TilePlace& at, int64_t keys, int64_t c, int64_t r, const SquareOptions& with) {
  const bool apart = options_.capped && options_.added;  // from the scores, which are capped
  float* const scores = apart ? terms() : values(at_.s, 0);
  __m512 unused[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  if (apart)
    for (int64_t i = 0; i < kSide * kSide; i += kLanes) _mm512_store_ps(scores + i, _mm512_setzero_ps());
  if (options_.added) vec::add_terms<2, vec::bf16>(t_.inputs, head_, at, options_.capped ? 1.0f : options_.scale, scores, unused);
  if (options_.drops && dropout_key_ != at.key / kDropoutBlock) {
    dropout_key_ = at.key / kDropoutBlock;
    vec::make_dropout_words<2>(t_.inputs, head_, {at.row, at.rows, dropout_key_ * kDropoutBlock, kDropoutBlock}, dropout_words());
  }
  const bool counts = !with.whole || with.masked || with.mixed || t_.inputs.bias;
  __m512i seen[2];
  for (int q = 0; counts && q < 2; ++q) seen[q] = with.split ? seen_words(c, r)[q] : words_of_square(at, keys, r, q, with);
  const auto weigh = [&](auto capped, auto drops, auto keeps) __attribute__((always_inline)) {
    counts ? weigh_square_with<capped.value, drops.value, true, keeps.value>(keys, c, r, seen, with.split, apart)
           : weigh_square_with<capped.value, drops.value, false, keeps.value>(keys, c, r, seen, with.split, apart);
  };
  const auto weigh_as = [&](auto capped, auto keeps) __attribute__((always_inline)) {
    options_.drops ? weigh(capped, vec::Flag<true>{}, keeps) : weigh(capped, vec::Flag<false>{}, keeps);
  };
  if (options_.capped)
    t_.has_dbias ? weigh_as(vec::Flag<true>{}, vec::Flag<true>{}) : weigh_as(vec::Flag<true>{}, vec::Flag<false>{});
  else
    t_.has_dbias ? weigh_as(vec::Flag<false>{}, vec::Flag<true>{}) : weigh_as(vec::Flag<false>{}, vec::Flag<false>{});
  if (!t_.has_dbias) return;
  bias_gradient().template add<2>(gradients(), at);
}

// Which keys of a square half q of its rows sees, as far as places, the mask and documents go.
template <bool kOptions>
inline __m512i Backward<kOptions>::words_of_square(const vec::TilePlace& at, int64_t keys, int64_t r, int q, const SquareOptions& with) const {
  const int64_t row = r * kSide + q * kLanes;
  __m512i words = SeenKeys{_mm512_load_si512(begin_ + row), _mm512_load_si512(visible_ + row)}.words(keys * kSide);
  if (with.masked) words = _mm512_and_si512(words, _mm512_loadu_si512(mask_words() + q * kLanes));
  if (with.mixed) {
    const __m512i ids = vec::load_ids(t_.inputs.document_q + at.row + q * kLanes, at.rows - q * kLanes);
    words = _mm512_and_si512(words, words_of_documents(ids, t_.inputs.document_k + at.key, at.keys));
  }
  return words;
}

// The same, and no bias.
template <bool kOptions>
inline __m512i Backward<kOptions>::counting_words_of_square(const vec::TilePlace& at, int64_t keys, int64_t r, int q,
                                                            const SquareOptions& with) const {
  const __m512i words = words_of_square(at, keys, r, q, with);
  if (!kOptions || !t_.inputs.bias || at.rows <= q * kLanes) return words;
  return without_hidden_by_bias(t_, head_, {at.row + q * kLanes, min_of(kLanes, at.rows - q * kLanes), at.key, at.keys}, words);
}

// As weigh_square, with the score's functions of the vector kernels. kCounts: only pairs that are `seen` and no bias hides count, kKeeps: the
// gradient of whole scores is wanted.
template <bool kOptions>
template <bool kCapped, bool kDrops, bool kCounts, bool kKeeps>
__attribute__((noinline)) void Backward<kOptions>::weigh_square_with(int64_t keys, int64_t c, int64_t r, const __m512i (&seen)[2], bool split,
                                                                     bool apart) {
  const float *s = values(at_.s, 0), *dp = values(at_.dp, 0), *added = apart ? terms() : nullptr;
  float* const to_gradient = gradients();
  char *p = tile(at_.p, (c * kSquares + r) * 2), *ds = tile(at_.ds, (c * kSquares + r) * 2), *ds_keys = tile(at_.ds_keys, (c * kSquares + r) * 2);
  const vec::CappedScore cap(static_cast<double>(options_.scale), kCapped ? t_.softcap : 1.0f);
  const __m512 scale = _mm512_set1_ps(kCapped ? t_.softcap : options_.left()), to_fixed = _mm512_set1_ps(kLog2E * kFixed);
  const __m512 nan = _mm512_set1_ps(__builtin_nanf(""));
  const __m512 drop_scale = _mm512_set1_ps(t_.inputs.dropout_scale);
  const __m512 hidden = _mm512_set1_ps(split ? __builtin_nanf("") : kMinusInfinity);  // by a bias, unless `seen` says it
  const __m512i half = _mm512_set1_epi32(0x8000);
  __m512 lse[2], delta[2];
  for (int q = 0; q < 2; ++q) {
    const int64_t row = r * kSide + q * 16;
    lse[q] = _mm512_load_ps(lse_ + row);
    delta[q] = _mm512_load_ps(delta_ + row);
  }
  // Of the square's first key, in its block of random numbers. A block has four words of a row.
  const int64_t of_block = kDrops ? (t_.key_begin + keys * kSide) % kDropoutBlock : 0;
  const uint32_t* words = dropout_words();
  for (int row = 0; row < 16; ++row) {
    __m512i rounded[2][2];  // dS of the keys row, row + 16 and of the two halves of the rows
#pragma GCC unroll 2
    for (int key = 0; key < 2; ++key) {
      __m512 w[2];
#pragma GCC unroll 2
      for (int q = 0; q < 2; ++q) {
        const int at = (key * 16 + row) * 32 + q * 16;
        const __m512 x = _mm512_load_ps(s + at), t = kCapped ? vec::shaped(cap, x) : x;
        const __m512 term = kCapped && added ? _mm512_load_ps(added + at) : _mm512_setzero_ps();
        // A difference first: scores and lse may be larger than fixed point is.
        const __m512 difference = kCapped && added ? _mm512_fmadd_ps(t, scale, _mm512_sub_ps(term, lse[q])) : _mm512_fmsub_ps(t, scale, lse[q]);
        const __m512 u = _mm512_mul_ps(difference, to_fixed);
        w[q] = _mm512_mask_mov_ps(exp2_coarse(u), _mm512_cmp_ps_mask(u, u, _CMP_UNORD_Q), nan);
        __m512 of_weight = _mm512_load_ps(dp + at), kept = w[q];
        if (kDrops) {
          const int64_t of_key = of_block + key * 16 + row;
          const __m512i word = _mm512_load_si512(words + vec::dropout_word(0, of_key) * kSide + q * 16);
          const __mmask16 stays = _mm512_test_epi32_mask(word, _mm512_set1_epi32(static_cast<int>(1u << dropout_bit(0, of_key))));
          of_weight = _mm512_maskz_mul_ps(stays, of_weight, drop_scale);
          kept = _mm512_maskz_mov_ps(stays, kept);  // dv gets the scale when it is whole
        }
        __m512 of_score = _mm512_mul_ps(w[q], _mm512_sub_ps(of_weight, delta[q]));
        __m512 of_product = kCapped ? vec::through(cap, t, of_score) : of_score;
        if (kCounts) {
          const __mmask16 hides = _mm512_cmp_ps_mask(kCapped && added ? term : t, hidden, _CMP_EQ_OQ);
          const auto counts = static_cast<__mmask16>(sees(seen[q], key * 16 + row) & ~hides);
          of_score = _mm512_maskz_mov_ps(counts, of_score);
          of_product = _mm512_maskz_mov_ps(counts, of_product);
          kept = _mm512_maskz_mov_ps(counts, kept);
        }
        if (kKeeps) _mm512_store_ps(to_gradient + at, of_score);
        w[q] = kept;
        rounded[key][q] = _mm512_add_epi32(_mm512_castps_si512(of_product), half);
      }
      store_row(p + key * kTileBytes, row, pair_bf16(w[0], w[1]));
    }
    store_gradients(ds, ds_keys, row, rounded);
  }
}

}  // namespace fattn::core::amx
