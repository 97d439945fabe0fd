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

// One call gives eight numbers of 16 bits, for eight keys of a query: of each block of 32 keys there are four calls, and call t has the keys 2 t, 2 t
// + 1, 2 t + 8, 2 t + 9, ... 2 t + 25: those of a row that one thread holds in the accumulator of a matrix instruction. A word holds two neighbouring
// keys, the even one in its low half.
constexpr int kDropoutBlock = 32, kDropoutCalls = 4;

// `stream` is offset + batch entry * nheads + head.
static constexpr Philox4 dropout_words(unsigned long long seed, unsigned long long stream, unsigned query, unsigned block, int call) {
  return philox(seed,
                {{static_cast<unsigned>(stream), query, block * kDropoutCalls + static_cast<unsigned>(call), static_cast<unsigned>(stream >> 32)}});
}

// Where keys are the rows of an accumulator and queries its columns (the transposed scores of a backward pass), lanes 4 apart have the same call, one
// its even keys, the other its odd ones, each of the same two queries. Each makes the words of one query, the lane of the even keys those of the
// first, keeps the numbers of its own keys and gives the others away.
struct DropoutShare {
  unsigned own[2], given[2];  // two numbers each: of words 0 and 1, and 2 and 3
};
static constexpr unsigned dropout_halves(unsigned a, unsigned b, bool high) {
  return high ? (a >> 16) | (b & 0xffff0000u) : (a & 0xffffu) | (b << 16);
}
static constexpr DropoutShare dropout_share(const Philox4& words, bool odd) {
  return {{dropout_halves(words.word[0], words.word[1], odd), dropout_halves(words.word[2], words.word[3], odd)},
          {dropout_halves(words.word[0], words.word[1], !odd), dropout_halves(words.word[2], words.word[3], !odd)}};
}
// Word w of the result: the lane's key of word w, of the first query in the low half, of the second in the high half.
static constexpr Philox4 dropout_joined(const DropoutShare& mine, const unsigned (&got)[2], bool odd) {
  Philox4 all{};
  for (int i = 0; i < 2; ++i) {
    const unsigned first = odd ? got[i] : mine.own[i], second = odd ? mine.own[i] : got[i];
    all.word[2 * i] = dropout_halves(first, second, false);
    all.word[2 * i + 1] = dropout_halves(first, second, true);
  }
  return all;
}

// The number of one pair, in [0, 65536): its weight is dropped if that is below Problem::dropout_below.
static constexpr int dropout_number(unsigned long long seed, unsigned long long stream, long long query, long long key) {
  const int in_block = static_cast<int>(key % kDropoutBlock);
  const Philox4 words = dropout_words(seed, stream, static_cast<unsigned>(query), static_cast<unsigned>(key / kDropoutBlock), in_block % 8 / 2);
  const unsigned word = words.word[in_block / 8];
  return static_cast<int>(key % 2 == 0 ? word & 0xffffu : word >> 16);
}

}  // namespace fattn::core
