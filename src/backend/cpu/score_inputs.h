// What is added to scores, which pairs are hidden and which weights are dropped, on tiles [key][lane] with query rows in lanes, as the products are.
#pragma once

#include "backend/cpu/kernels.h"
#include "device_abi/dropout.h"

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

// ---- Dropout --------------------------------------------------------------------------------------------------------

// Words of a query that `keys` keys may meet, from any key on: a block of random numbers has four.
constexpr int64_t dropout_rows(int64_t keys) { return (keys / kDropoutBlock + 2) * kDropoutCalls; }
static_assert(kDropoutBlock / kDropoutCalls <= kMaskKeys);  // so that the words of a mask have room there, too, before

// Numbers of a whole vector, for the compiler's operators. (Of more than one, g++ 12 makes moves through memory and general registers.)
typedef uint32_t Words __attribute__((vector_size(sizeof(U32))));
constexpr int kDropoutQueries = 8, kDropoutLanes = 2 * kDropoutQueries;  // query pairs of a call; of two calls, which are made together

FATTN_INLINE U32 as_u32(const Words& words) {
  U32 same;
  __builtin_memcpy(&same, &words, sizeof same);
  return same;
}

// Of the lanes of two calls those from `lane` on: `first` in the first call's, `second` in the second's.
template <class V>
FATTN_INLINE U32 of_calls(uint32_t first, uint32_t second, int lane) {
  if constexpr (sizeof(V) == kDropoutLanes * sizeof(uint32_t))
    return as_u32(V{first, first, first, first, first, first, first, first, second, second, second, second, second, second, second, second});
  else
    return set1_u32(lane < kDropoutQueries ? first : second);
}

// dropout_kept() of each lane.
FATTN_INLINE void keep_of_planes(const Words (&planes)[4], uint32_t below, Words& kept) {
  const auto turn = [](Words & word, int by) __attribute__((always_inline)) { word = word >> by | word << (32 - by); };
  // dropout_step(), whose threshold is the same for all.
  const auto step = [&](const Words& bits, int bit) __attribute__((always_inline)) {
    if (dropout_threshold(below, bit) == 0)
      kept = bits & kept;
    else
      kept = bits | kept;
  };
  Words mixed[4];
  kept = ~Words{};
  FATTN_UNROLL
  for (int bit = 0; bit < 4; ++bit) {
    mixed[bit] = planes[bit];
    turn(mixed[bit], kDropoutMix);
    mixed[bit] ^= planes[bit];
    step(mixed[bit], bit);
  }
  FATTN_UNROLL
  for (int bit = 0; bit < 4; ++bit) step(planes[bit], 4 + bit);
  turn(kept, kDropoutLowTurn);
  FATTN_UNROLL
  for (int bit = 0; bit < 4; ++bit) step(mixed[bit], 8 + bit);
  turn(kept, kDropoutTurn);
  FATTN_UNROLL
  for (int bit = 0; bit < 4; ++bit) step(planes[bit], 12 + bit);
}

// The words of the eight query pairs from `query` on, of call `call`, then of the next call. Of the products of Philox's first three rounds all but
// one of each are the same for a call's lanes.
FATTN_INLINE void dropout_calls(const ScoreInputs& in, uint64_t stream, uint32_t query, uint32_t call, uint32_t (&kept)[kDropoutLanes]) {
  const auto wide = [](uint32_t x, uint32_t m) { return static_cast<uint64_t>(x) * m; };
  const auto high = [](uint64_t x) { return static_cast<uint32_t>(x >> 32); };
  const auto low = [](uint64_t x) { return static_cast<uint32_t>(x); };
  static constexpr uint32_t kQueries[kDropoutLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7};
  uint32_t k0 = low(in.seed), k1 = high(in.seed);
  const auto next_key = [&] {
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  };
  // First round: of the new words only the first differs between the lanes of a call (by the query), and the first two between calls.
  const uint64_t a0 = wide(low(stream), kPhiloxM0), b0[2] = {wide(call, kPhiloxM1), wide(call + 1, kPhiloxM1)};
  const uint32_t r0[2] = {high(b0[0]) ^ k0, high(b0[1]) ^ k0}, s2 = high(a0) ^ high(stream) ^ k1, s3 = low(a0);
  // Second: the last two between lanes, and the first between calls.
  next_key();
  const uint64_t b1 = wide(s2, kPhiloxM1);
  const uint32_t s1 = low(b1), t3 = s3 ^ k1, t0[2] = {high(b1) ^ low(b0[0]) ^ k0, high(b1) ^ low(b0[1]) ^ k0};
  // Third: all but the last between lanes.
  next_key();
  const uint64_t a2[2] = {wide(t0[0], kPhiloxM0), wide(t0[1], kPhiloxM0)};
  const uint32_t t1 = s1 ^ k0, r2[2] = {high(a2[0]) ^ k1, high(a2[1]) ^ k1};

  const U32 m0 = set1_u32(kPhiloxM0), m1 = set1_u32(kPhiloxM1);
  const uint32_t third_k0 = k0, third_k1 = k1;
  FATTN_UNROLL
  for (int lane = 0; lane < kDropoutLanes; lane += kLanes) {
    U32 x[4], of_high, of_low, high0, low0, high1, low1;
    Words queries;
    __builtin_memcpy(&queries, kQueries + lane, sizeof queries);
    queries += query;
    multiply_wide(xor_u32(of_calls<Words>(r0[0], r0[1], lane), as_u32(queries)), m0, of_high, of_low);
    multiply_wide(xor_u32(of_high, set1_u32(t3)), m1, high1, x[1]);
    x[0] = xor_u32(high1, set1_u32(t1));
    x[2] = xor_u32(of_low, of_calls<Words>(r2[0], r2[1], lane));
    x[3] = of_calls<Words>(low(a2[0]), low(a2[1]), lane);
    k0 = third_k0;
    k1 = third_k1;
    FATTN_UNROLL
    for (int round = 3; round < kPhiloxRounds; ++round) {
      next_key();
      multiply_wide(x[0], m0, high0, low0);
      multiply_wide(x[2], m1, high1, low1);
      x[0] = xor_u32(xor_u32(high1, x[1]), set1_u32(k0));
      x[1] = low1;
      x[2] = xor_u32(xor_u32(high0, x[3]), set1_u32(k1));
      x[3] = low0;
    }
    Words planes[4], of_lanes;
    for (int word = 0; word < 4; ++word) __builtin_memcpy(&planes[word], &x[word], sizeof planes[word]);
    keep_of_planes(planes, static_cast<uint32_t>(in.dropout_below), of_lanes);
    __builtin_memcpy(kept + lane, &of_lanes, sizeof of_lanes);
  }
}

// Which word of a row a key has, counted from those of the block that key `first` is in, and the bit there.
FATTN_INLINE int64_t dropout_word(int64_t first, int64_t key) { return (key / kDropoutBlock - first / kDropoutBlock) * kDropoutCalls + key % 8 / 2; }
FATTN_INLINE int dropout_bit_of_row(int64_t key) { return dropout_bit(0, key); }

// Of two calls the words of rows: of the first eight a call's, of the other eight the same, turned to where their bits begin. Rows of `to` are a
// call's, `stride` apart.
template <class V>
FATTN_INLINE void store_rows_of_calls(const uint32_t (&kept)[kDropoutLanes], int64_t stride, uint32_t* to) {
  constexpr int kTurn = dropout_bit(kDropoutQueries, 0);
  if constexpr (sizeof(V) == sizeof kept) {
    constexpr V kTurns = {0, 0, 0, 0, 0, 0, 0, 0, kTurn, kTurn, kTurn, kTurn, kTurn, kTurn, kTurn, kTurn};
    V both;
    __builtin_memcpy(&both, kept, sizeof both);
    const V first = __builtin_shufflevector(both, both, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7) >> kTurns;
    const V second = __builtin_shufflevector(both, both, 8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15) >> kTurns;
    __builtin_memcpy(to, &first, sizeof first);
    __builtin_memcpy(to + stride, &second, sizeof second);
  } else {
    for (int call = 0; call < 2; ++call)
      for (int l = 0; l < kDropoutQueries; ++l) {
        to[call * stride + l] = kept[call * kDropoutQueries + l];
        to[call * stride + kDropoutQueries + l] = kept[call * kDropoutQueries + l] >> kTurn;
      }
  }
}

// Which pairs of a tile stay: of each row, in a lane, the words of the blocks that its keys are in. Queries 8 apart share random numbers, and each
// random word belongs to 8 of them: so lanes of a vector are calls.
template <int kVecs>
__attribute__((noinline)) void make_dropout_words(const ScoreInputs& in, int64_t head, const TilePlace& at, uint32_t* to) {
  constexpr int64_t kRows = kVecs * kLanes;
  const uint64_t stream = in.stream + static_cast<uint64_t>(head);
  const int64_t first_block = at.key / kDropoutBlock, blocks = at.keys > 0 ? (at.key + at.keys - 1) / kDropoutBlock - first_block + 1 : 0;
  for (int64_t group = at.row / kDropoutLanes; group * kDropoutLanes < at.row + kRows; ++group) {
    const int64_t first = group * kDropoutLanes - at.row;  // lane of its first row
    for (int64_t call = 0; call < blocks * kDropoutCalls; call += 2) {
      alignas(64) uint32_t kept[kDropoutLanes];
      dropout_calls(in, stream, static_cast<uint32_t>(group) * kDropoutQueries, static_cast<uint32_t>(first_block * kDropoutCalls + call), kept);
      uint32_t* row = to + call * kRows + first;
      if (first >= 0 && first + kDropoutLanes <= kRows) {
        store_rows_of_calls<Words>(kept, kRows, row);
      } else {
        uint32_t some[2 * kDropoutLanes];
        store_rows_of_calls<Words>(kept, kDropoutLanes, some);
        for (int64_t l = 0; l < kDropoutLanes; ++l)
          if (first + l >= 0 && first + l < kRows) {
            row[l] = some[l];
            row[kRows + l] = some[kDropoutLanes + l];
          }
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

// out[row][key] = sums[row][key] + from[key][lane], or kStores, from[key][lane], for the rows and keys of a place; rows of `sums` and `out`, which
// may be the same, are their strides apart, 0 where rows are summed.
template <bool kStores, int kVecs, class Out>
__attribute__((noinline)) void add_transposed(const float* from, const TilePlace& at, const float* sums, int64_t sums_stride, Out* out,
                                              int64_t out_stride) {
  const auto add_block = [&](int64_t key, int w) __attribute__((always_inline)) {
    F32 block[kLanes];
    const int64_t columns = at.keys - key, first = static_cast<int64_t>(w) * kLanes, rows = at.rows - first;
    const float* corner = from + (key * kVecs + w) * kLanes;
    const float* more = kStores ? nullptr : sums + (at.row + first) * sums_stride + at.key + key;
    Out* to = out + (at.row + first) * out_stride + at.key + key;
    if (columns >= kLanes && rows >= kLanes) {
      FATTN_UNROLL
      for (int j = 0; j < kLanes; ++j) block[j] = load(corner + j * kVecs * kLanes);
      transpose(block);
      FATTN_UNROLL
      for (int i = 0; i < kLanes; ++i) store(to + i * out_stride, kStores ? block[i] : add(load(more + i * sums_stride), block[i]));
    } else {
      for (int j = 0; j < kLanes; ++j) block[j] = j < columns ? load(corner + j * kVecs * kLanes) : zero();
      transpose(block);
      for (int64_t i = 0; i < kLanes && i < rows; ++i)
        store_n(to + i * out_stride, kStores ? block[i] : add(load_n(more + i * sums_stride, columns), block[i]), columns);
    }
  };
  if constexpr (kLanes * sizeof(Out) < 64) {  // a cache line has several blocks: all of its own, before other rows take its place in the L1 cache
    for (int w = 0; w < kVecs; ++w)
      for (int64_t key = 0; key < at.keys; key += kLanes) add_block(key, w);
  } else {
    for (int64_t key = 0; key < at.keys; key += kLanes)
      for (int w = 0; w < kVecs; ++w) add_block(key, w);
  }
}

// Where the gradient of a head's bias goes: fp32 sums over those that share it, one after the other, or the tensor itself, T. Who comes first finds
// anything there and stores, with zeros where it computes nothing, which saves a pass that only writes zeros; who comes last writes the tensor, which
// saves one that only converts. Pointers are at row 0, key 0 of the head's.
template <class T>
struct BiasGradient {
  float* sums;
  int64_t sums_stride;
  T* out;
  int64_t out_stride;
  bool first, last;

  // Adds from[key][lane], the rows and keys of a place.
  template <int kVecs>
  void add(const float* from, const TilePlace& at) const {
    if (last && first)
      add_transposed<true, kVecs>(from, at, nullptr, 0, out, out_stride);
    else if (last)
      add_transposed<false, kVecs>(from, at, sums, sums_stride, out, out_stride);
    else if (first)
      add_transposed<true, kVecs>(from, at, nullptr, 0, sums, sums_stride);
    else
      add_transposed<false, kVecs>(from, at, sums, sums_stride, sums, sums_stride);
  }
  // Rows [row, end_row) and keys [begin, end) get nothing.
  void pass_over(int64_t row, int64_t end_row, int64_t begin, int64_t end) const {
    if (!first && !last) return;
    for (; row < end_row; ++row)
      for (int64_t key = begin; key < end; key += kLanes) {
        const F32 sum = first ? zero() : load_n(sums + row * sums_stride + key, end - key);
        if (last)
          store_n(out + row * out_stride + key, sum, end - key);
        else
          store_n(sums + row * sums_stride + key, sum, end - key);
      }
  }
  // Fetches part `part` of `parts` of what `add` will touch.
  void prefetch(const TilePlace& at, int64_t part, int64_t parts) const {
    if (sums_stride > 0 && !(first && last)) prefetch_pairs(sums, 4, sums_stride, at, part, parts);
    if (last) prefetch_pairs(out, static_cast<int64_t>(sizeof(T)), out_stride, at, part, parts);
  }
};

// Of query head `head` of a task's group.
template <class T>
BiasGradient<T> bias_gradient_of(const BackwardTask& task, int64_t head) {
  const bool own = task.dbias_head_stride > 0;
  return {task.dbias_sums ? task.dbias_sums + head * task.dbias_head_stride : nullptr,
          task.dbias_stride,
          task.dbias ? static_cast<T*>(task.dbias) + head * task.dbias_out_head_stride : nullptr,
          task.dbias_out_stride,
          task.first_of_dbias && (head == 0 || own),
          task.last_of_dbias && (head == task.group - 1 || own)};
}

}  // namespace fattn::core::FATTN_ISA
