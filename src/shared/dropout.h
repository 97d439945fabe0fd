// Dropout: which weights stay, from their place alone, so that every backend, tiling and pass drops the same ones. Include-free, so that device code
// can use it too, and `static`, because units built for other instruction sets do and the linker must not share their copies. The random numbers are
// those of Philox4x32-7 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3. SC 2011; seven are the fewest rounds that pass
// BigCrush there, and the rounds are most of what dropout costs).
#pragma once

namespace fattn::core {

struct Philox4 {
  unsigned word[4];
};

constexpr unsigned kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u, kPhiloxW0 = 0x9E3779B9u, kPhiloxW1 = 0xBB67AE85u;
constexpr int kPhiloxRounds = 7;

static constexpr Philox4 philox(unsigned long long key, Philox4 counter) {
  unsigned k0 = static_cast<unsigned>(key), k1 = static_cast<unsigned>(key >> 32);
  unsigned c0 = counter.word[0], c1 = counter.word[1], c2 = counter.word[2], c3 = counter.word[3];
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const unsigned long long a = static_cast<unsigned long long>(kPhiloxM0) * c0, b = static_cast<unsigned long long>(kPhiloxM1) * c2;
    c0 = static_cast<unsigned>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<unsigned>(b);
    c2 = static_cast<unsigned>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<unsigned>(a);
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  return {{c0, c1, c2, c3}};
}

// Two calls give a bit each for 32 pairs, whether the pair stays: of the queries q and q + 8, q % 16 < 8, the keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9,
// ... 2 t + 57 of a block of 64, which is what one thread holds of these rows in the accumulators of a matrix instruction. Of such a word pair (i, j)
// has bit dropout_bit(i, j).
//
// The eight random words are the eight bits of a byte of each pair, not bytes side by side: so one logical operation a bit compares all 32 numbers
// with the threshold, and the result is one bit a pair already. A pair's number has 16 bits: its own byte, and below it the byte of the pair whose
// bit is 8 further, in the other row, which seldom decides. So a pair is dropped with probability T / 65536 exactly, those of a row share nothing,
// and two that share a byte have a correlation between 0 and 1 / 257.
constexpr int kDropoutBlock = 64, kDropoutCalls = 4, kDropoutBits = 16, kDropoutTurn = 8;

static constexpr int dropout_bit(long long query, long long key) {
  return static_cast<int>(query % 16 / 8 * 8 + key % kDropoutBlock / 8 + key % 2 * 16);
}
// The number of a query among those of 8 with its partner.
static constexpr unsigned dropout_query(unsigned query) { return query / 16 * 8 + query % 8; }

// Bits 4 `half` to 4 `half` + 3 of the bytes of the pairs of query pair `query`. `stream` is offset + batch entry * nheads + head.
static constexpr Philox4 dropout_planes(unsigned long long seed, unsigned long long stream, unsigned query, unsigned block, unsigned call,
                                        unsigned half) {
  return philox(seed, {{static_cast<unsigned>(stream), 2 * query + half, block * kDropoutCalls + call, static_cast<unsigned>(stream >> 32)}});
}

// One bit of numbers: which of them are not below the threshold so far, from the lowest bit up. `threshold` has that bit of the threshold, inverted,
// in all places. The majority of three.
static constexpr unsigned dropout_step(unsigned bits, unsigned threshold, unsigned kept) {
  return (bits & threshold) | (bits & kept) | (threshold & kept);
}
static constexpr unsigned dropout_threshold(unsigned below, int bit) { return (below >> bit & 1u) - 1u; }

// The word of query pair `query`, of those that are not below. `thresholds`: dropout_threshold() of each bit.
static constexpr unsigned dropout_kept(const Philox4& low, const Philox4& high, const unsigned (&thresholds)[kDropoutBits]) {
  unsigned kept = ~0u;
  for (int bit = 0; bit < kDropoutBits; ++bit) {
    if (bit == kDropoutBits / 2) kept = kept >> kDropoutTurn | kept << (32 - kDropoutTurn);
    const Philox4& from = bit % 8 < 4 ? low : high;
    kept = dropout_step(from.word[bit % 4], thresholds[bit], kept);
  }
  return kept;
}
static constexpr unsigned dropout_kept(const Philox4& low, const Philox4& high, unsigned below) {
  unsigned thresholds[kDropoutBits] = {};
  for (int bit = 0; bit < kDropoutBits; ++bit) thresholds[bit] = dropout_threshold(below, bit);
  return dropout_kept(low, high, thresholds);
}

// Where keys are the rows of an accumulator and queries its columns (the transposed scores of a backward pass), lanes 4 apart want the same two
// words, of neighbouring query pairs, one for its even keys, the other for its odd ones. Each makes one and gives it away. Result: 16 bits of the
// first query pair in the low half, in the order of dropout_bit(), and 16 of the second in the high half.
static constexpr unsigned dropout_joined(unsigned own, unsigned other, bool odd) {
  return odd ? (other >> 16) | (own & 0xffff0000u) : (own & 0xffffu) | (other << 16);
}

// The number of one pair, in [0, 65536): its weight is dropped if that is below Problem::dropout_below. As dropout_kept(), pair by pair.
static constexpr int dropout_number(unsigned long long seed, unsigned long long stream, long long query, long long key) {
  const unsigned pair = dropout_query(static_cast<unsigned>(query)), block = static_cast<unsigned>(key / kDropoutBlock),
                 call = static_cast<unsigned>(key % 8 / 2);
  const Philox4 low = dropout_planes(seed, stream, pair, block, call, 0), high = dropout_planes(seed, stream, pair, block, call, 1);
  const int own = dropout_bit(query, key), below = (own + kDropoutTurn) % 32;
  unsigned number = 0;
  for (int bit = 0; bit < 8; ++bit) {
    const unsigned plane = bit < 4 ? low.word[bit] : high.word[bit - 4];
    number |= (plane >> own & 1u) << (8 + bit) | (plane >> below & 1u) << bit;
  }
  return static_cast<int>(number);
}

}  // namespace fattn::core
