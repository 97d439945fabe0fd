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

// One call gives a bit each for 32 pairs, whether the pair stays: of the queries q and q + 8, q % 16 < 8, the keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9,
// ... 2 t + 57 of a block of 64, which is what one thread holds of these rows in the accumulators of a matrix instruction. Of such a word pair (i, j)
// has bit dropout_bit(i, j).
//
// The four random words are the four highest bits of each pair's number, not numbers side by side: so one logical operation a bit compares all 32
// numbers with the threshold, and the result is one bit a pair already. A number has 16 bits. The lower twelve, which decide in one pair of 16, are
// those of pairs at other places of the word, by dropout_mixed() and by turns: so that each number is uniform (a pair is dropped with probability
// T / 65536 exactly), the high bytes of any two are independent, and what the rest shares makes a correlation of at most 1 / 256, whatever T is (a
// number's third digit is the first of another's, and decides in one pair of 256). That is tested (tests/test_features.cpp).
constexpr int kDropoutRows = 16, kDropoutBlock = 64, kDropoutCalls = 4, kDropoutBits = 16;
constexpr int kDropoutMix = 5, kDropoutTurn = 8, kDropoutLowTurn = 4;

static constexpr int dropout_bit(long long query, long long key) {
  return static_cast<int>(query % 16 / 8 * 8 + key % kDropoutBlock / 8 + key % 2 * 16);
}
// The number of a query among those of 8 with its partner.
static constexpr unsigned dropout_query(unsigned query) { return query / 16 * 8 + query % 8; }

// `stream` is offset + batch entry * nheads + head.
static constexpr Philox4 dropout_planes(unsigned long long seed, unsigned long long stream, unsigned query, unsigned block, unsigned call) {
  return philox(seed, {{static_cast<unsigned>(stream), query, block * kDropoutCalls + call, static_cast<unsigned>(stream >> 32)}});
}

// Bit n of the result is bit n + `by` of `word`.
static constexpr unsigned dropout_turned(unsigned word, int by) { return word >> by | word << (32 - by); }
static constexpr unsigned dropout_mixed(unsigned plane) { return plane ^ dropout_turned(plane, kDropoutMix); }

// One bit of numbers: which of them are not below the threshold so far, from the lowest bit up. `threshold` has that bit of the threshold, inverted,
// in all places. The majority of three.
static constexpr unsigned dropout_step(unsigned bits, unsigned threshold, unsigned kept) {
  return (bits & threshold) | (bits & kept) | (threshold & kept);
}
static constexpr unsigned dropout_threshold(unsigned below, int bit) { return (below >> bit & 1u) - 1u; }

// Eight steps, of the bits from `first` on; `turn`: between the four that are mixed and the four that are not.
static constexpr unsigned dropout_byte(const Philox4& planes, const unsigned (&thresholds)[kDropoutBits], int first, int turn, unsigned kept) {
  for (int bit = 0; bit < 4; ++bit) kept = dropout_step(dropout_mixed(planes.word[bit]), thresholds[first + bit], kept);
  kept = turn == 0 ? kept : dropout_turned(kept, turn);
  for (int bit = 0; bit < 4; ++bit) kept = dropout_step(planes.word[bit], thresholds[first + 4 + bit], kept);
  return kept;
}
// The word of those that are not below. `thresholds`: dropout_threshold() of each bit.
static constexpr unsigned dropout_kept(const Philox4& planes, const unsigned (&thresholds)[kDropoutBits]) {
  const unsigned low = dropout_byte(planes, thresholds, 0, 0, ~0u);
  return dropout_byte(planes, thresholds, 8, kDropoutTurn, dropout_turned(low, kDropoutLowTurn));
}
static constexpr unsigned dropout_kept(const Philox4& planes, unsigned below) {
  unsigned thresholds[kDropoutBits] = {};
  for (int bit = 0; bit < kDropoutBits; ++bit) thresholds[bit] = dropout_threshold(below, bit);
  return dropout_kept(planes, thresholds);
}

// The number of the pair with bit `bit` of a word, in [0, 65536): its weight is dropped if that is below Problem::dropout_below. As dropout_kept(),
// pair by pair.
static constexpr unsigned dropout_number(const Philox4& planes, int bit) {
  const auto own = [&](int place) {
    unsigned bits = 0;
    for (int n = 0; n < 4; ++n) bits |= (planes.word[n] >> (place % 32) & 1u) << n;
    return bits;
  };
  const auto mixed = [&](int place) { return own(place) ^ own(place + kDropoutMix); };
  const int next = bit + kDropoutTurn, last = next + kDropoutLowTurn;
  return own(bit) << 12 | mixed(next) << 8 | own(last) << 4 | mixed(last);
}

// Where keys are the rows of an accumulator and queries its columns (the transposed scores of a backward pass), lanes 4 apart want the same two
// words, of neighbouring query pairs, one for its even keys, the other for its odd ones. Each makes one and gives it away. Result: 16 bits of the
// first query pair in the low half, in the order of dropout_bit(), and 16 of the second in the high half.
static constexpr unsigned dropout_joined(unsigned own, unsigned other, bool odd) {
  return odd ? (other >> 16) | (own & 0xffff0000u) : (own & 0xffffu) | (other << 16);
}

// The same of a query and a key.
static constexpr int dropout_number(unsigned long long seed, unsigned long long stream, long long query, long long key) {
  const Philox4 planes = dropout_planes(seed, stream, dropout_query(static_cast<unsigned>(query)), static_cast<unsigned>(key / kDropoutBlock),
                                        static_cast<unsigned>(key % 8 / 2));
  return static_cast<int>(dropout_number(planes, dropout_bit(query, key)));
}

}  // namespace fattn::core
