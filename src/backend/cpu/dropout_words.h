// Dropout on tiles [key][lane] (score_inputs.h): words of random bits, one for each query of a block of keys, and the weights that they drop.
#pragma once

#include "backend/cpu/score_inputs.h"
#include "device_abi/dropout.h"

namespace fattn::core::FATTN_ISA {

// Words of a query that `keys` keys may meet, from any key on: a block of random numbers has four.
constexpr int64_t dropout_rows(int64_t keys) { return (keys / kDropoutBlock + 2) * kDropoutCalls; }
static_assert(kDropoutBlock / kDropoutCalls <= kMaskKeys);  // so that the words of a mask have room there, too, before

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
      dropout_calls(in, stream, static_cast<uint32_t>(group) * kDropoutQueries + in.dropout_query,
                    static_cast<uint32_t>(first_block * kDropoutCalls + call) + in.dropout_call, kept);
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

}  // namespace fattn::core::FATTN_ISA
