// What is added to scores and which pairs are hidden, on tiles [key][lane] with query rows in lanes, as the products are.
#pragma once

#include "backend/cpu/kernels.h"

namespace fattn::core::FATTN_ISA {

// Where a tile lies in its head: its first row and key, `rows` and `keys` of them that exist. Tiles are kVecs vectors wide.
struct TilePlace {
  int64_t row, rows, key, keys;
};

// Calls take(key, x) for every key of a place: lane i of x is the key's element of row place.row + w kLanes + i of a tensor whose rows are row_stride
// apart, 0 where there is no row. With a row_stride of 0 all lanes have the one row's element.
template <class T, class Take>
FATTN_INLINE void for_transposed(const T* from, int64_t row_stride, const TilePlace& at, int w, const Take& take) {
  if (row_stride == 0) {
    for (int64_t key = 0; key < at.keys; ++key) take(key, set1(to_float(from[at.key + key])));
    return;
  }
  const int64_t first = static_cast<int64_t>(w) * kLanes, rows = at.rows - first;
  for (int64_t key = 0; key < at.keys; key += kLanes) {
    F32 block[kLanes];
    const int64_t columns = at.keys - key;
    const T* corner = from + (at.row + first) * row_stride + at.key + key;
    if (columns >= kLanes && rows >= kLanes) {
      FATTN_UNROLL
      for (int i = 0; i < kLanes; ++i) block[i] = load(corner + i * row_stride);
      transpose(block);
      FATTN_UNROLL
      for (int j = 0; j < kLanes; ++j) take(key + j, block[j]);
    } else {
      for (int i = 0; i < kLanes; ++i) block[i] = i < rows ? load_n(corner + i * row_stride, columns) : zero();
      transpose(block);
      for (int64_t j = 0; j < kLanes && j < columns; ++j) take(key + j, block[j]);
    }
  }
}

FATTN_INLINE F32 lane_numbers() {
  float numbers[kLanes];
  for (int i = 0; i < kLanes; ++i) numbers[i] = static_cast<float>(i);
  return load(numbers);
}

// A score with what is added to it: hidden stays hidden, even with NaN.
FATTN_INLINE F32 with_term(F32 score, F32 scale, F32 term) {
  const F32 hidden = set1(minus_infinity());
  return where_equal(term, hidden, hidden, fma(score, scale, term));
}

// Each of the following goes over the scores of a tile once, in place, and leaves in largest[w] the largest of what was there and they are.

// score = softcap tanh(product ...), of products.
template <int kVecs>
__attribute__((noinline)) void cap_scores(const CappedScore& function, float* scores, int64_t n, F32* largest) {
  F32 top[kVecs];
  FATTN_UNROLL
  for (int w = 0; w < kVecs; ++w) top[w] = largest[w];
  for (int64_t key = 0; key < n; ++key) FATTN_UNROLL
  for (int w = 0; w < kVecs; ++w) {
    float* at = scores + (key * kVecs + w) * kLanes;
    const F32 s = plus(function, shaped(function, load(at)), zero());
    top[w] = max(top[w], s);
    store(at, s);
  }
  FATTN_UNROLL
  for (int w = 0; w < kVecs; ++w) largest[w] = top[w];
}

// score = scale score - slope |row + shift - key|. Distances below 2^24 are exact.
template <int kVecs>
__attribute__((noinline)) void add_alibi(F32 scale, float slope, int64_t shift, const TilePlace& at, float* scores, F32* largest) {
  // Of most tiles all keys lie on one side of all rows, and distances need no absolute values.
  const int64_t least = at.row + shift - at.key - (at.keys - 1), most = at.row + shift - at.key + kVecs * kLanes - 1;
  const bool before = least >= 0, after = most <= 0;
  const F32 minus_slope = set1(after ? slope : -slope);
  F32 first[kVecs], top[kVecs];  // distances from the first key
  FATTN_UNROLL
  for (int w = 0; w < kVecs; ++w) {
    first[w] = add(set1(static_cast<float>(at.row + shift - at.key + w * kLanes)), lane_numbers());
    top[w] = largest[w];
  }
  const auto add_distances = [&](auto distance) __attribute__((always_inline)) {
    for (int64_t key = 0; key < at.keys; ++key) {
      const F32 further = set1(static_cast<float>(static_cast<int>(key)));
      FATTN_UNROLL
      for (int w = 0; w < kVecs; ++w) {
        float* to = scores + (key * kVecs + w) * kLanes;
        const F32 s = fma(load(to), scale, mul(minus_slope, distance(sub(first[w], further))));
        top[w] = max(top[w], s);
        store(to, s);
      }
    }
  };
  if (before || after)
    add_distances([](F32 away) __attribute__((always_inline)) { return away; });
  else
    add_distances([](F32 away) __attribute__((always_inline)) { return max(away, sub(zero(), away)); });
  FATTN_UNROLL
  for (int w = 0; w < kVecs; ++w) largest[w] = top[w];
}

// score = scale score + bias
template <int kVecs, class T>
__attribute__((noinline)) void add_bias(const T* bias, int64_t row_stride, const TilePlace& at, F32 scale, float* scores, F32* largest) {
  for (int w = 0; w < kVecs; ++w) {
    F32 top = largest[w];
    for_transposed(
        bias, row_stride, at, w, [&](int64_t key, F32 x) __attribute__((always_inline)) {
          float* to = scores + (key * kVecs + w) * kLanes;
          const F32 s = with_term(load(to), scale, x);
          top = max(top, s);
          store(to, s);
        });
    largest[w] = top;
  }
}

// Whole scores: what is added to `scale` times the scores that are there.
template <int kVecs, class T>
__attribute__((noinline)) void add_terms(const ScoreInputs& in, int64_t head, const TilePlace& at, float scale, float* scores, F32* largest) {
  F32 unused[kVecs];
  if (in.alibi_slopes) {
    for (int w = 0; w < kVecs; ++w) unused[w] = largest[w];
    add_alibi<kVecs>(set1(scale), in.alibi_slopes[head * in.alibi_head_stride], in.shift, at, scores, in.bias ? unused : largest);
    scale = 1.0f;
  }
  if (!in.bias) return;
  const int64_t offset = head * in.bias_head_stride;
  if (in.bias_fp32)
    add_bias<kVecs>(static_cast<const float*>(in.bias) + offset, in.bias_stride, at, set1(scale), scores, largest);
  else
    add_bias<kVecs>(static_cast<const T*>(in.bias) + offset, in.bias_stride, at, set1(scale), scores, largest);
}

// Which pairs of a place the mask leaves. It often is the same for whole tiles: padding, documents or a causal mask written out.
enum class Seen { kNone, kSome, kAll };

constexpr int kMaskKeys = 32;  // of a word

// Bit j of word key / kMaskKeys of a lane: whether its row sees key key + j of the place, from `to` on as many words for each lane as the keys need.
// Lanes without a row see nothing.
template <int kVecs>
__attribute__((noinline)) Seen make_mask_words(const ScoreInputs& in, int64_t head, const TilePlace& at, uint32_t* to) {
  constexpr int64_t kRows = kVecs * kLanes;
  const uint8_t* corner = in.mask + head * in.mask_head_stride + at.row * in.mask_stride + at.key;
  const int64_t rows = in.mask_stride == 0 ? 1 : at.rows;
  uint32_t seen = 0, hidden = 0;
  const int64_t whole = at.keys / kMaskKeys * kMaskKeys, rest = at.keys - whole;
  for (int64_t r = 0; r < rows; ++r, corner += in.mask_stride) {  // row by row, which the processor fetches ahead
    uint32_t* word = to + r;
    for (int64_t key = 0; key < whole; key += kMaskKeys, word += kRows) {
      *word = nonzero_bytes(corner + key);
      seen |= *word;
      hidden |= ~*word;
    }
    if (rest == 0) continue;
    uint8_t some[kMaskKeys] = {};
    for (int64_t i = 0; i < rest; ++i) some[i] = corner[whole + i];
    *word = nonzero_bytes(some);
    seen |= *word;
    hidden |= ~*word & ((1u << rest) - 1u);
  }
  for (int64_t key = 0; key < at.keys; key += kMaskKeys, to += kRows) {
    const uint32_t others = in.mask_stride == 0 ? to[0] : 0;
    for (int64_t r = rows; r < kRows; ++r) to[r] = others;
  }
  return seen == 0 ? Seen::kNone : hidden == 0 ? Seen::kAll : Seen::kSome;
}

// -Inf in the pairs that the mask hides.
template <int kVecs>
__attribute__((noinline)) void hide_masked(const uint32_t* words, int64_t keys, float* scores, F32* largest) {
  const F32 hidden = set1(minus_infinity());
  F32 top[kVecs];
  FATTN_UNROLL
  for (int w = 0; w < kVecs; ++w) top[w] = largest[w];
  for (int64_t first = 0; first < keys; first += kMaskKeys, words += kVecs * kLanes) {
    U32 word[kVecs];
    FATTN_UNROLL
    for (int w = 0; w < kVecs; ++w) word[w] = load_u32(words + w * kLanes);
    const int64_t end = keys - first < kMaskKeys ? keys : first + kMaskKeys;
    uint32_t bit = 1;
    for (int64_t key = first; key < end; ++key, bit <<= 1) {
      const U32 of_key = set1_u32(bit);
      FATTN_UNROLL
      for (int w = 0; w < kVecs; ++w) {
        float* to = scores + (key * kVecs + w) * kLanes;
        const F32 s = where_bit(word[w], of_key, load(to), hidden);
        top[w] = max(top[w], s);
        store(to, s);
      }
    }
  }
  FATTN_UNROLL
  for (int w = 0; w < kVecs; ++w) largest[w] = top[w];
}

constexpr int64_t kFetchKeys = 12;  // products of so many keys between two parts of what is fetched

// Fetches part `part` of `parts` of a tile's rows of a tensor over (query, key) into the L2 cache (the rows share few sets of L1). In parts, between
// products: a burst would fill the queue of outstanding misses and stop the loads behind it.
FATTN_INLINE void prefetch_pairs(const void* from, int64_t element, int64_t row_stride, const TilePlace& at, int64_t part, int64_t parts) {
  const char* corner = static_cast<const char*>(from) + (at.row * row_stride + at.key) * element;
  for (int64_t row = at.rows * part / parts; row < at.rows * (part + 1) / parts; ++row)
    for (int64_t byte = 0; byte < at.keys * element; byte += 64) __builtin_prefetch(corner + row * row_stride * element + byte, 0, 2);
}
// Is there something to fetch? A row that is one for all is there soon.
FATTN_INLINE bool has_pairs(const ScoreInputs& in) { return (in.bias && in.bias_stride > 0) || (in.mask && in.mask_stride > 0); }
// What add_terms and hide_masked will read.
template <class T>
FATTN_INLINE void prefetch_terms(const ScoreInputs& in, int64_t head, const TilePlace& at, int64_t part, int64_t parts) {
  const int64_t element = in.bias_fp32 ? 4 : static_cast<int64_t>(sizeof(T));
  if (in.bias && in.bias_stride > 0)
    prefetch_pairs(static_cast<const char*>(in.bias) + head * in.bias_head_stride * element, element, in.bias_stride, at, part, parts);
  if (in.mask && in.mask_stride > 0) prefetch_pairs(in.mask + head * in.mask_head_stride, 1, in.mask_stride, at, part, parts);
}

// Is a pair hidden by document, bias or mask? For the rare ways that go pair by pair.
template <class T>
bool is_hidden(const ScoreInputs& in, int64_t head, int64_t row, int64_t key) {
  if (in.document_q && in.document_q[row] != in.document_k[key]) return true;
  if (in.mask && in.mask[head * in.mask_head_stride + row * in.mask_stride + key] == 0) return true;
  if (!in.bias) return false;
  const int64_t at = head * in.bias_head_stride + row * in.bias_stride + key;
  return (in.bias_fp32 ? static_cast<const float*>(in.bias)[at] : to_float(static_cast<const T*>(in.bias)[at])) == minus_infinity();
}

}  // namespace fattn::core::FATTN_ISA
