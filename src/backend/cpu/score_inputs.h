// What is added to scores, which pairs are hidden and which weights are dropped, as tiles [key][lane] with query rows in lanes, as the products are. A task
// without such inputs makes none of these tiles.
#pragma once

#include "backend/cpu/kernels.h"
#include "shared/dropout.h"

namespace fattn::core::FATTN_ISA {

// Where a tile lies in its head: its first row and key, `rows` and `keys` of them that exist. It is `vecs` vectors wide, in rows of `stride` elements.
struct TilePlace {
  int64_t row, rows, key, keys;
  int vecs;
  int64_t stride;
};

// x[i] = lane i of rows row + i of a tensor whose rows are `row_stride` apart, transposed: calls take(key, vector of rows, vector) for all of the place.
template <class T, class Take>
FATTN_INLINE void for_transposed(const T* from, int64_t row_stride, const TilePlace& at, const Take& take) {
  for (int64_t key = 0; key < at.keys; key += kLanes)
    for (int w = 0; w < at.vecs; ++w) {
      F32 block[kLanes];
      const int64_t columns = at.keys - key < kLanes ? at.keys - key : kLanes, first = static_cast<int64_t>(w) * kLanes;
      for (int i = 0; i < kLanes; ++i)
        block[i] = first + i < at.rows ? load_n(from + (at.row + first + i) * row_stride + at.key + key, columns) : zero();
      transpose(block);
      for (int64_t j = 0; j < columns; ++j) take(key + j, w, block[j]);
    }
}

// Adds a bias tile to what is there; the first tile is stored.
template <class T>
void add_bias(const T* bias, int64_t row_stride, const TilePlace& at, bool first, float* to) {
  for_transposed(bias, row_stride, at, [&](int64_t key, int w, F32 x) {
    float* out = to + key * at.stride + w * kLanes;
    store(out, first ? x : add(x, load(out)));
  });
}

FATTN_INLINE F32 lane_numbers() {
  float numbers[kLanes];
  for (int i = 0; i < kLanes; ++i) numbers[i] = static_cast<float>(i);
  return load(numbers);
}

// -slope |row + shift - key|. Distances below 2^24 are exact.
static inline void alibi_terms(float slope, int64_t shift, const TilePlace& at, float* to) {
  const F32 lanes = lane_numbers(), minus_slope = set1(-slope);
  for (int64_t key = 0; key < at.keys; ++key)
    for (int w = 0; w < at.vecs; ++w) {
      const F32 away = add(set1(static_cast<float>(at.row + shift - at.key - key + w * kLanes)), lanes);
      store(to + key * at.stride + w * kLanes, mul(minus_slope, max(away, sub(zero(), away))));
    }
}

// What is added to the scores of a tile, -Inf where a pair is hidden. `head` counts from the task's first.
template <class T>
__attribute__((noinline)) void make_terms(const ScoreInputs& in, int64_t head, const TilePlace& at, float* to) {
  bool first = true;
  if (in.alibi_slopes) {
    alibi_terms(in.alibi_slopes[head * in.alibi_head_stride], in.shift, at, to);
    first = false;
  }
  if (in.bias) {
    const int64_t offset = head * in.bias_head_stride;
    if (in.bias_fp32)
      add_bias(static_cast<const float*>(in.bias) + offset, in.bias_stride, at, first, to);
    else
      add_bias(static_cast<const T*>(in.bias) + offset, in.bias_stride, at, first, to);
    first = false;
  }
  if (!in.mask) return;
  const F32 hidden = set1(minus_infinity());
  for_transposed(in.mask + head * in.mask_head_stride, in.mask_stride, at, [&](int64_t key, int w, F32 seen) {
    float* out = to + key * at.stride + w * kLanes;
    store(out, where_equal(seen, zero(), hidden, first ? zero() : load(out)));
  });
}

// A score with what is added to it: hidden stays hidden, even with NaN.
FATTN_INLINE F32 with_term(F32 score, F32 scale, F32 term) {
  const F32 hidden = set1(minus_infinity());
  return where_equal(term, hidden, hidden, fma(score, scale, term));
}

// Is a pair hidden by bias or mask? For the rare ways that go pair by pair.
template <class T>
bool is_hidden(const ScoreInputs& in, int64_t head, int64_t row, int64_t key) {
  if (in.mask && in.mask[head * in.mask_head_stride + row * in.mask_stride + key] == 0) return true;
  if (!in.bias) return false;
  const int64_t at = head * in.bias_head_stride + row * in.bias_stride + key;
  return (in.bias_fp32 ? static_cast<const float*>(in.bias)[at] : to_float(static_cast<const T*>(in.bias)[at])) == minus_infinity();
}

// ---- Dropout --------------------------------------------------------------------------------------------------------

constexpr int64_t kDropoutPairs = kDropoutBlock / 2;
// Rows of words that `keys` keys need.
constexpr int64_t dropout_rows(int64_t keys) { return round_up(keys, kDropoutBlock) / 2; }

struct WidePhilox {
  U32 word[4];
};
// Philox4x32-10 of counters that differ in the second word only. Of the products of the first three rounds four are the same for all lanes.
FATTN_INLINE WidePhilox wide_philox(uint64_t key, uint32_t c0, U32 c1, uint32_t c2, uint32_t c3) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  const U32 m0 = set1_u32(kPhiloxM0), m1 = set1_u32(kPhiloxM1);
  const auto wide = [](uint32_t x, uint32_t m) { return static_cast<uint64_t>(x) * m; };
  const auto next_key = [&] {
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  };
  // First round: of the new words only the first differs between lanes.
  uint64_t a = wide(c0, kPhiloxM0), b = wide(c2, kPhiloxM1);
  WidePhilox x;
  x.word[0] = xor_u32(c1, set1_u32(static_cast<uint32_t>(b >> 32) ^ k0));
  uint32_t s1 = static_cast<uint32_t>(b), s2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1, s3 = static_cast<uint32_t>(a);
  // Second: the last two.
  next_key();
  U32 high, low;
  multiply_wide(x.word[0], m0, high, low);
  b = wide(s2, kPhiloxM1);
  const uint32_t s0 = static_cast<uint32_t>(b >> 32) ^ s1 ^ k0;
  s1 = static_cast<uint32_t>(b);
  x.word[2] = xor_u32(high, set1_u32(s3 ^ k1));
  x.word[3] = low;
  // Third: all but the last.
  next_key();
  multiply_wide(x.word[2], m1, high, low);
  a = wide(s0, kPhiloxM0);
  x.word[0] = xor_u32(high, set1_u32(s1 ^ k0));
  x.word[1] = low;
  x.word[2] = xor_u32(x.word[3], set1_u32(static_cast<uint32_t>(a >> 32) ^ k1));
  x.word[3] = set1_u32(static_cast<uint32_t>(a));
  FATTN_UNROLL
  for (int round = 3; round < kPhiloxRounds; ++round) {
    next_key();
    U32 high0, low0, high1, low1;
    multiply_wide(x.word[0], m0, high0, low0);
    multiply_wide(x.word[2], m1, high1, low1);
    x.word[0] = xor_u32(xor_u32(high1, x.word[1]), set1_u32(k0));
    x.word[1] = low1;
    x.word[2] = xor_u32(xor_u32(high0, x.word[3]), set1_u32(k1));
    x.word[3] = low0;
  }
  return x;
}

// The words of a tile: row r has keys 2 r and 2 r + 1 behind at.key, which is a multiple of kDropoutBlock.
static inline __attribute__((noinline)) void make_dropout_words(const ScoreInputs& in, int64_t head, const TilePlace& at, uint32_t* to) {
  const uint64_t stream = in.stream + static_cast<uint64_t>(head);
  uint32_t rows[kLanes];
  for (int w = 0; w < at.vecs; ++w) {
    for (int i = 0; i < kLanes; ++i) rows[i] = static_cast<uint32_t>(at.row + w * kLanes + i);
    const U32 row = load_u32(rows);
    for (int64_t block = 0; block * kDropoutBlock < at.keys; ++block)
      for (int call = 0; call < kDropoutCalls; ++call) {
        const auto counter = static_cast<uint32_t>((at.key / kDropoutBlock + block) * kDropoutCalls + call);
        const WidePhilox x = wide_philox(in.seed, static_cast<uint32_t>(stream), row, counter, static_cast<uint32_t>(stream >> 32));
        for (int i = 0; i < 4; ++i)
          store_u32(to + (block * kDropoutPairs + 4 * i + call) * at.stride + w * kLanes, x.word[i]);
      }
  }
}

// What a word's number is compared with, as the Vec layer wants it.
FATTN_INLINE U32 dropout_limit(const ScoreInputs& in) { return set1_u32(static_cast<uint32_t>(in.dropout_below) << 16); }
// x of an even or odd key, 0 if it is dropped.
FATTN_INLINE F32 keep(F32 x, int64_t key, U32 word, U32 limit) {
  return key % 2 == 0 ? keep_low_not_below(x, word, limit) : keep_not_below(x, word, limit);
}

// Drops weights of keys [0, n), in place; words begin at the same, even, key.
template <int kVecs>
__attribute__((noinline)) void drop_weights(OpsF32, const ScoreInputs& in, const uint32_t* words, int64_t n, float* weights) {
  constexpr int64_t kStride = kVecs * kLanes;
  const U32 limit = dropout_limit(in);
  for (int64_t key = 0; key < n; ++key) FATTN_UNROLL
  for (int w = 0; w < kVecs; ++w) {
    float* at = weights + key * kStride + w * kLanes;
    store(at, keep(load(at), key, load_u32(words + key / 2 * kStride + w * kLanes), limit));
  }
}
#ifdef FATTN_DOT
template <int kVecs>
__attribute__((noinline)) void drop_weights(OpsDot, const ScoreInputs& in, const uint32_t* words, int64_t n, uint32_t* weights) {
  constexpr int64_t kStride = kVecs * kLanes;
  for (int64_t i = 0; i < (n + 1) / 2 * kStride; i += kLanes) store_pairs(weights + i, keep_halves(load_pairs(weights + i), load_u32(words + i), in.dropout_below));
}
#endif

// ---- The gradient of a bias -------------------------------------------------------------------------------------------

// to[row][key] += from[key][lane] for the rows and keys of a place; rows of `to` are to_stride apart, 0 where rows are summed.
static inline __attribute__((noinline)) void add_transposed(const float* from, const TilePlace& at, float* to, int64_t to_stride) {
  for (int64_t key = 0; key < at.keys; key += kLanes)
    for (int w = 0; w < at.vecs; ++w) {
      F32 block[kLanes];
      const int64_t columns = at.keys - key < kLanes ? at.keys - key : kLanes, first = static_cast<int64_t>(w) * kLanes;
      for (int64_t j = 0; j < kLanes; ++j) block[j] = j < columns ? load(from + (key + j) * at.stride + first) : zero();
      transpose(block);
      for (int64_t i = 0; i < kLanes && first + i < at.rows; ++i) {
        float* out = to + (at.row + first + i) * to_stride + at.key + key;
        store_n(out, add(load_n(out, columns), block[i]), columns);
      }
    }
}

}  // namespace fattn::core::FATTN_ISA
