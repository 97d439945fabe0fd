// What is added to scores, which pairs are hidden and which weights are dropped, on tiles [key][lane] with query rows in lanes, as the products are.
#pragma once

#include "backend/cpu/kernels.h"
#include "shared/dropout.h"

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

// score = scale score - slope |row + shift - key|. Distances below 2^24 are exact.
template <int kVecs>
__attribute__((noinline)) void add_alibi(F32 scale, float slope, int64_t shift, const TilePlace& at, float* scores, F32* largest) {
  const F32 minus_slope = set1(-slope);
  F32 first[kVecs], top[kVecs];  // distances from the first key
  FATTN_UNROLL
  for (int w = 0; w < kVecs; ++w) {
    first[w] = add(set1(static_cast<float>(at.row + shift - at.key + w * kLanes)), lane_numbers());
    top[w] = largest[w];
  }
  for (int64_t key = 0; key < at.keys; ++key) {
    const F32 further = set1(static_cast<float>(static_cast<int>(key)));
    FATTN_UNROLL
    for (int w = 0; w < kVecs; ++w) {
      float* to = scores + (key * kVecs + w) * kLanes;
      const F32 away = sub(first[w], further), s = fma(load(to), scale, mul(minus_slope, max(away, sub(zero(), away))));
      top[w] = max(top[w], s);
      store(to, s);
    }
  }
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

// -Inf in the pairs that the mask hides.
template <int kVecs>
__attribute__((noinline)) void hide_masked(const ScoreInputs& in, int64_t head, const TilePlace& at, float* scores, F32* largest) {
  const F32 hidden = set1(minus_infinity());
  for (int w = 0; w < kVecs; ++w) {
    F32 top = largest[w];
    for_transposed(
        in.mask + head * in.mask_head_stride, in.mask_stride, at, w, [&](int64_t key, F32 seen) __attribute__((always_inline)) {
          float* to = scores + (key * kVecs + w) * kLanes;
          const F32 s = where_equal(seen, zero(), hidden, load(to));
          top = max(top, s);
          store(to, s);
        });
    largest[w] = top;
  }
}

// Which pairs of a place the mask leaves. It often is the same for whole tiles: padding, documents or a causal mask written out.
enum class Seen { kNone, kSome, kAll };
static inline Seen seen_of(const ScoreInputs& in, int64_t head, const TilePlace& at) {
  constexpr uint64_t kOnes = 0x0101010101010101u, kTops = 0x8080808080808080u;
  const uint8_t* row = in.mask + head * in.mask_head_stride + at.row * in.mask_stride + at.key;
  uint64_t seen = 0, hidden = 0;  // not 0 if there is such a pair
  for (int64_t r = 0; r < (in.mask_stride == 0 ? 1 : at.rows); ++r, row += in.mask_stride) {
    int64_t key = 0;
    for (; key + 8 <= at.keys; key += 8) {
      uint64_t x;
      __builtin_memcpy(&x, row + key, sizeof x);
      seen |= x;
      hidden |= (x - kOnes) & ~x & kTops;  // some byte is 0
    }
    for (; key < at.keys; ++key) {
      seen |= row[key];
      hidden |= row[key] == 0;
    }
    if (seen != 0 && hidden != 0) return Seen::kSome;
  }
  return seen == 0 ? Seen::kNone : Seen::kAll;
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

// ---- Dropout --------------------------------------------------------------------------------------------------------

// Words of a query that `keys` keys may meet, from any key on: a block of random numbers has four.
constexpr int64_t dropout_rows(int64_t keys) { return (keys / kDropoutBlock + 2) * kDropoutCalls; }

struct WidePhilox {
  U32 word[4];
};
// Philox4x32-7 of counters that differ in the second word only. Of the products of the first three rounds four are the same for all lanes.
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

// Which word of a row a key has, counted from those of the block that key `first` is in, and the bit there.
FATTN_INLINE int64_t dropout_word(int64_t first, int64_t key) { return (key / kDropoutBlock - first / kDropoutBlock) * kDropoutCalls + key % 8 / 2; }
FATTN_INLINE int dropout_bit_of_row(int64_t key) { return dropout_bit(0, key); }

// Which pairs of a tile stay: of each row, in a lane, the words of the blocks that its keys are in. Queries 8 apart share random numbers, and each
// random word belongs to 8 of them: so lanes of a vector are calls.
template <int kVecs>
__attribute__((noinline)) void make_dropout_words(const ScoreInputs& in, int64_t head, const TilePlace& at, uint32_t* to) {
  constexpr int64_t kRows = kVecs * kLanes;
  constexpr int kQueries = 8, kCallsOfGroup = 2 * kQueries;  // of 16 rows
  static_assert(kCallsOfGroup % kLanes == 0);
  const uint64_t stream = in.stream + static_cast<uint64_t>(head);
  const int64_t blocks = at.keys > 0 ? (at.key + at.keys - 1) / kDropoutBlock - at.key / kDropoutBlock + 1 : 0;
  for (int64_t group = at.row / 16; group * 16 < at.row + kRows; ++group) {
    uint32_t queries[kCallsOfGroup];
    for (int i = 0; i < kCallsOfGroup; ++i) queries[i] = 2 * (static_cast<uint32_t>(group) * kQueries + i % kQueries) + i / kQueries;
    for (int64_t block = 0; block < blocks; ++block) {
      constexpr int kWords = kDropoutCalls * kQueries;
      uint32_t planes[kDropoutBits / 2][kWords], kept[kWords];  // all bits of a word first, then all queries
      for (int call = 0; call < kDropoutCalls; ++call) {
        const auto counter = static_cast<uint32_t>((at.key / kDropoutBlock + block) * kDropoutCalls + call);
        uint32_t words[4][kCallsOfGroup];
        for (int first = 0; first < kCallsOfGroup; first += kLanes) {
          const WidePhilox x =
              wide_philox(in.seed, static_cast<uint32_t>(stream), load_u32(queries + first), counter, static_cast<uint32_t>(stream >> 32));
          for (int i = 0; i < 4; ++i) store_u32(words[i] + first, x.word[i]);
        }
        for (int bit = 0; bit < kDropoutBits / 2; ++bit)
          __builtin_memcpy(planes[bit] + call * kQueries, words[bit % 4] + bit / 4 * kQueries, sizeof(uint32_t) * kQueries);
      }
      for (uint32_t& word : kept) word = ~0u;
      for (int bit = 0; bit < kDropoutBits; ++bit) {
        const uint32_t threshold = dropout_threshold(static_cast<unsigned>(in.dropout_below), bit);
        const uint32_t* bits = planes[bit % 8];
        if (bit == kDropoutBits / 2)
          for (uint32_t& word : kept) word = word >> kDropoutTurn | word << (32 - kDropoutTurn);
        for (int i = 0; i < kWords; ++i) kept[i] = dropout_step(bits[i], threshold, kept[i]);
      }
      for (int row = 0; row < 16; ++row) {
        const int64_t lane = group * 16 + row - at.row;
        if (lane < 0 || lane >= kRows) continue;
        for (int call = 0; call < kDropoutCalls; ++call)
          to[(block * kDropoutCalls + call) * kRows + lane] = kept[call * kQueries + row % kQueries] >> dropout_bit(row, 0);
      }
    }
  }
}

// Drops weights of keys [key0, key0 + n), in place.
template <int kVecs>
__attribute__((noinline)) void drop_weights(OpsF32, int64_t key0, const uint32_t* words, int64_t n, float* weights) {
  constexpr int64_t kStride = kVecs * kLanes;
  for (int64_t key = 0; key < n; ++key) {
    const U32 bit = set1_u32(1u << dropout_bit_of_row(key0 + key));
    const uint32_t* of_key = words + dropout_word(key0, key0 + key) * kStride;
    FATTN_UNROLL
    for (int w = 0; w < kVecs; ++w) {
      float* at = weights + key * kStride + w * kLanes;
      store(at, keep_if(load(at), load_u32(of_key + w * kLanes), bit));
    }
  }
}
#ifdef FATTN_DOT
// key0 is even.
template <int kVecs>
__attribute__((noinline)) void drop_weights(OpsDot, int64_t key0, const uint32_t* words, int64_t n, uint32_t* weights) {
  constexpr int64_t kStride = kVecs * kLanes;
  for (int64_t key = 0; key < n; key += 2) {
    const int bit = dropout_bit_of_row(key0 + key);
    const uint32_t* of_key = words + dropout_word(key0, key0 + key) * kStride;
    FATTN_UNROLL
    for (int w = 0; w < kVecs; ++w) {
      uint32_t* at = weights + key / 2 * kStride + w * kLanes;
      store_pairs(at, keep_halves(load_pairs(at), load_u32(of_key + w * kLanes), bit));
    }
  }
}
#endif

// ---- The gradient of a bias -------------------------------------------------------------------------------------------

// to[row][key] += from[key][lane], or kStores, = , for the rows and keys of a place; rows of `to` are to_stride apart, 0 where rows are summed.
template <bool kStores, int kVecs>
__attribute__((noinline)) void add_transposed(const float* from, const TilePlace& at, float* to, int64_t to_stride) {
  const auto add_block = [&](int64_t key, int w) __attribute__((always_inline)) {
    F32 block[kLanes];
    const int64_t columns = at.keys - key, first = static_cast<int64_t>(w) * kLanes, rows = at.rows - first;
    const float* corner = from + (key * kVecs + w) * kLanes;
    float* out = to + (at.row + first) * to_stride + at.key + key;
    if (columns >= kLanes && rows >= kLanes) {
      FATTN_UNROLL
      for (int j = 0; j < kLanes; ++j) block[j] = load(corner + j * kVecs * kLanes);
      transpose(block);
      FATTN_UNROLL
      for (int i = 0; i < kLanes; ++i) store(out + i * to_stride, kStores ? block[i] : add(load(out + i * to_stride), block[i]));
    } else {
      for (int j = 0; j < kLanes; ++j) block[j] = j < columns ? load(corner + j * kVecs * kLanes) : zero();
      transpose(block);
      for (int64_t i = 0; i < kLanes && i < rows; ++i)
        store_n(out + i * to_stride, kStores ? block[i] : add(load_n(out + i * to_stride, columns), block[i]), columns);
    }
  };
  if constexpr (kLanes * sizeof(float) < 64) {  // a cache line has several blocks: all of its own, before other rows take its place in the L1 cache
    for (int w = 0; w < kVecs; ++w)
      for (int64_t key = 0; key < at.keys; key += kLanes) add_block(key, w);
  } else {
    for (int64_t key = 0; key < at.keys; key += kLanes)
      for (int w = 0; w < kVecs; ++w) add_block(key, w);
  }
}

}  // namespace fattn::core::FATTN_ISA
