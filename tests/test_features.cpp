// Everything that a score may depend on, in random combinations, and dropout's random numbers.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <bitset>
#include <cmath>
#include <cstdlib>
#include <string>
#include <tuple>
#include <vector>

#include "device_abi/dropout.h"
#include "fattn/fattn.hpp"
#include "prepared_cases.h"
#include "testing/dropout.h"
#include "testing/random.h"
#include "testing/random_case.h"
#include "testing/run.h"
#include "testing/targets.h"

namespace fattn::testing {
namespace {

using Parameter = std::tuple<DType, Target>;
std::string parameter_name(const ::testing::TestParamInfo<Parameter>& p) {
  return std::string(fattn::name_of(std::get<0>(p.param))) + "_" + name_of(std::get<1>(p.param));
}

class Features : public ::testing::TestWithParam<Parameter> {
 protected:
  void run(uint64_t begin, uint64_t end, uint64_t step = 1) {
    const auto [dtype, target] = GetParam();
    const std::string why = why_unavailable(target, dtype);
    if (!why.empty()) GTEST_SKIP() << why;
    for (uint64_t n = begin; n < end; n += step) {
      const Case c = random_case(dtype, n);
      Target on = target;
      on.num_threads = 1 + static_cast<int>(n % 3);
      const CaseResult result = Prepared::of(c)->run(on);
      EXPECT_TRUE(result.passed()) << "combination " << n << ", " << c.name << ": " << result.summary();
    }
  }
};
class FeaturesSmall : public Features {};
class FeaturesMany : public Features {};

TEST_P(FeaturesSmall, CombinationsAgreeWithTheOracle) { run(0, 12); }
// Each in one of the three dtypes in turn, or with FATTN_TEST_WHOLE=1 in all.
TEST_P(FeaturesMany, CombinationsAgreeWithTheOracle) {
  const char* const whole = std::getenv("FATTN_TEST_WHOLE");
  const DType dtype = std::get<0>(GetParam());
  const bool all = whole && std::string(whole) == "1";
  const uint64_t turn = dtype == DType::kF32 ? 0 : dtype == DType::kF16 ? 1 : 2;
  run(all ? 12 : 12 + turn, 260, all ? 1 : 3);
}

std::vector<Target> computing(bool reference) {
  std::vector<Target> all;
  for (const Target& t : all_targets()) {
    if (t.backend == Backend::kReference && !reference) continue;
    Case c;
    c.key_lengths = true;
    if (is_to_compute(t, c)) all.push_back(t);
  }
  return all;
}
const auto kParameters = ::testing::Combine(::testing::Values(DType::kF32, DType::kF16, DType::kBF16), ::testing::ValuesIn(computing(true)));
INSTANTIATE_TEST_SUITE_P(Every, FeaturesSmall, kParameters, parameter_name);
// Without the reference backend, which is what it would be compared with.
const auto kFastParameters = ::testing::Combine(::testing::Values(DType::kF32, DType::kF16, DType::kBF16), ::testing::ValuesIn(computing(false)));
INSTANTIATE_TEST_SUITE_P(Every, FeaturesMany, kFastParameters, parameter_name);

// ---- Documents --------------------------------------------------------------------------------------------------------

// Ids hide what a mask of pairs with the same bits hides, to the last bit.
TEST(DocumentsSmall, AreAMaskOfPairs) {
  for (Documents documents : {Documents::kSorted, Documents::kAny})
    for (bool causal : {false, true}) {
      Case c;
      c.dtype = DType::kF64;
      c.batch = 2;
      c.seqlen_q = 70;
      c.seqlen_k = 90;
      c.nheads = 4;
      c.nheads_k = 2;
      c.headdim = c.headdim_v = 8;
      c.causal = causal;
      c.documents = documents;
      c.dlse = true;
      const CaseInputs with_ids = make_inputs(c);
      const Dense q = read(with_ids.scores.document_q), k = read(with_ids.scores.document_k);
      c.documents = Documents::kNone;
      c.mask = Pairs::kOne;
      CaseInputs with_mask = make_inputs(c);
      std::vector<uint8_t> mask;
      for (int64_t n = 0; n < c.batch; ++n)
        for (int64_t i = 0; i < c.seqlen_q; ++i)
          for (int64_t j = 0; j < c.seqlen_k; ++j)
            mask.push_back(q[static_cast<size_t>(n * c.seqlen_q + i)] == k[static_cast<size_t>(n * c.seqlen_k + j)] ? 1 : 0);
      EXPECT_GT(std::count(mask.begin(), mask.end(), 1), 500);
      with_mask.scores.mask = Tensor(mask.data(), DType::kU8, {c.batch, 1, c.seqlen_q, c.seqlen_k});
      const Options options = options_of(c, {Backend::kReference, Algorithm::kAuto, Isa::kAuto, 0});
      EXPECT_TRUE(same_bits(run_passes(c, with_ids, options), run_passes(c, with_mask, options))) << causal;
    }
}

// Where super-blocks of keys end at documents, which are others in each batch entry, what they add to the same gradient stays in order.
TEST(DocumentsSmall, GradientsOfASharedBiasAreOfAllEntries) {
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16})
    for (Pairs bias : {Pairs::kOne, Pairs::kHeads})
      for (int64_t seqlen_k : {1100, 1400}) {
        Case c;
        c.dtype = dtype;
        c.batch = 3;
        c.seqlen_q = 70;
        c.seqlen_k = seqlen_k;
        c.nheads = 2;
        c.nheads_k = 1;
        c.headdim = c.headdim_v = 16;
        c.documents = Documents::kLong;
        c.bias = bias;
        const PreparedCase prepared(c);
        for (const Target& target : all_targets()) {
          if (target.backend != Backend::kCpu || target.algorithm != Algorithm::kV2 || !why_unavailable(target, dtype).empty()) continue;
          const CaseResult result = prepared.run(target);
          EXPECT_TRUE(result.passed()) << name_of(target) << ", " << name_of(dtype) << ", " << seqlen_k << ": " << result.summary() << result.skipped;
        }
      }
}

// ---- Dropout --------------------------------------------------------------------------------------------------------

// The known answers that the authors publish with Random123.
TEST(DropoutSmall, PhiloxGivesItsKnownAnswers) {
  struct Known {
    core::Philox4 counter;
    unsigned long long key;
    core::Philox4 words;
  };
  for (const Known& k :
       {Known{{{0, 0, 0, 0}}, 0, {{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}}},
        Known{{{~0u, ~0u, ~0u, ~0u}}, ~0ull, {{0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}}},
        Known{{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0x299f31d0a4093822, {{0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}}}}) {
    const core::Philox4 got = core::philox(k.key, k.counter);
    const auto other = philox4x32({k.counter.word[0], k.counter.word[1], k.counter.word[2], k.counter.word[3]},
                                  {static_cast<uint32_t>(k.key), static_cast<uint32_t>(k.key >> 32)});
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(got.word[i], k.words.word[i]);
      EXPECT_EQ(other[i], k.words.word[i]);
    }
  }
}

// As docs/NUMERICS.md says, and every pair has a number of its own: no two are taken from the same bits in the same way.
TEST(DropoutSmall, NumbersArePairsOwn) {
  constexpr uint64_t kSeed = 5, kOffset = 9;
  for (const double p : {0.5, 0.1, 0.001}) {
    const Dropout dropout{kSeed, kOffset, p};
    const auto below = static_cast<int>(std::lround(p * 65536));
    for (int64_t query : {0, 7, 8, 21, 1000})
      for (int64_t key = 0; key < 1024; ++key) {
        const int number = core::dropout_number(kSeed, kOffset + 2 * 3 + 1, query, key);
        ASSERT_EQ(dropout.kept(2, 3, 1, query, key) == 0, number < below) << query << ", " << key;
      }
  }
  std::vector<int> numbers;  // of the rows that share random words and two more, and three blocks of keys
  for (const int64_t query : {0, 8, 1, 16})
    for (int64_t key = 0; key < 3 * core::kDropoutBlock; ++key) numbers.push_back(core::dropout_number(kSeed, kOffset, query, key));
  int64_t same = 0;
  for (size_t i = 0; i < numbers.size(); ++i)
    for (size_t j = 0; j < i; ++j) same += numbers[i] == numbers[j];
  EXPECT_LE(same, 16);  // of 294528 pairs about 4.5 are the same by chance
}

// Sums of random bits, each with the value that is wanted of it in the last place.
using Sum = std::bitset<129>;
// How many of them are independent over GF(2); -1 if their values contradict each other. Values that do not have the chance 2^-rank.
int rank_of(std::vector<Sum> sums) {
  size_t rank = 0;
  for (size_t random = 0; random < 128 && rank < sums.size(); ++random) {
    const auto pivot = std::find_if(sums.begin() + static_cast<std::ptrdiff_t>(rank), sums.end(), [&](const Sum& sum) { return sum[random]; });
    if (pivot == sums.end()) continue;
    std::swap(*pivot, sums[rank]);
    for (size_t i = rank + 1; i < sums.size(); ++i)
      if (sums[i][random]) sums[i] ^= sums[rank];
    ++rank;
  }
  const bool contradicts = std::any_of(sums.begin() + static_cast<std::ptrdiff_t>(rank), sums.end(), [](const Sum& sum) { return sum[128]; });
  return contradicts ? -1 : static_cast<int>(rank);
}
// The bits of the number of a pair of a word, from the lowest up.
std::vector<Sum> sums_of(int pair) {
  std::vector<Sum> sums(core::kDropoutBits);
  for (size_t random = 0; random < 128; ++random) {
    core::Philox4 one = {};
    one.word[random / 32] = 1u << random % 32;
    const unsigned number = core::dropout_number(one, pair);
    for (size_t bit = 0; bit < core::kDropoutBits; ++bit) sums[bit][random] = (number >> bit & 1u) != 0;
  }
  return sums;
}

TEST(DropoutSmall, NumbersAreUniformAndTheirHighBytesIndependentInPairs) {
  for (int i = 0; i < 32; ++i) {
    const std::vector<Sum> own = sums_of(i);
    EXPECT_EQ(rank_of(own), 16) << i;
    for (int j = 0; j < i; ++j) {
      const std::vector<Sum> other = sums_of(j);
      std::vector<Sum> bytes(own.begin() + 8, own.end());
      bytes.insert(bytes.end(), other.begin() + 8, other.end());
      EXPECT_EQ(rank_of(bytes), 16) << i << " and " << j;
    }
  }
}

// By the exact chance that both are dropped: numbers below T are those that agree with T from the top down to a bit of T that is 1, and there have 0.
TEST(DropoutSmall, TwoPairsHaveACorrelationOfAtMostOneIn256) {
  const std::vector<Sum> first = sums_of(0);
  for (const unsigned below : {1u, 66u, 272u, 6554u, 13107u, 38545u, 65520u, 65535u}) {
    const double p = below / 65536.0;
    const auto beginnings = [&](const std::vector<Sum>& number) {
      std::vector<std::vector<Sum>> all;
      for (size_t last = 0; last < core::kDropoutBits; ++last) {
        if ((below >> last & 1u) == 0) continue;
        std::vector<Sum> sums(number.begin() + static_cast<std::ptrdiff_t>(last), number.end());
        for (size_t bit = last + 1; bit < core::kDropoutBits; ++bit) sums[bit - last][128] = (below >> bit & 1u) != 0;
        all.push_back(sums);
      }
      return all;
    };
    for (int other = 1; other < 32; ++other) {
      double both = 0;
      for (const std::vector<Sum>& a : beginnings(first))
        for (std::vector<Sum> b : beginnings(sums_of(other))) {
          b.insert(b.end(), a.begin(), a.end());
          const int rank = rank_of(std::move(b));
          if (rank >= 0) both += std::ldexp(1.0, -rank);
        }
      EXPECT_LE(std::abs(both - p * p), p * (1 - p) / 256) << below << ", " << other << " places further";
    }
  }
}

unsigned kept_word(uint64_t seed, uint64_t stream, unsigned query, unsigned block, unsigned call, unsigned below) {
  return core::dropout_kept(core::dropout_planes(seed, stream, query, block, call), below);
}

TEST(DropoutSmall, ChancesAreExactAndPairsNearlyIndependent) {
  constexpr int kWords = 1 << 17;
  for (const unsigned below : {66u, 6554u, 32768u, 65535u}) {
    const double p = below / 65536.0, correlation = 1.0 / 256;
    int64_t one[32] = {}, both[32][32] = {};
    for (int n = 0; n < kWords; ++n) {
      unsigned dropped = ~kept_word(11, 12, 3, static_cast<unsigned>(n), 1, below);
      for (; dropped != 0; dropped &= dropped - 1) {
        const int bit = std::countr_zero(dropped);
        ++one[bit];
        for (unsigned others = dropped & (dropped - 1); others != 0; others &= others - 1) ++both[bit][std::countr_zero(others)];
      }
    }
    const double spread = 6 * std::sqrt(p * (1 - p) * kWords);
    for (int i = 0; i < 32; ++i) {
      EXPECT_NEAR(static_cast<double>(one[i]), p * kWords, spread) << below << ", bit " << i;
      for (int j = i + 1; j < 32; ++j) {
        const double expected = p * p * kWords, allowed = 6 * std::sqrt(expected + 1) + correlation * p * (1 - p) * kWords;
        EXPECT_NEAR(static_cast<double>(both[i][j]), expected, allowed) << below << ", bits " << i << " and " << j;
      }
    }
  }
}

// What the lanes of a warp make of the words where keys are the rows of an accumulator.
TEST(DropoutSmall, TransposedFragmentsHaveTheBitsOfTheirPairs) {
  constexpr uint64_t kSeed = 77, kStream = 12;
  constexpr unsigned kBelow = 30000;
  for (const int64_t first_query : {0, 16, 1008})
    for (const int64_t block : {0, 3}) {
      unsigned own[32];
      const auto query_of = [&](int lane) { return first_query + lane % 4 * 2; };
      for (int lane = 0; lane < 32; ++lane)
        own[lane] = kept_word(kSeed, kStream, core::dropout_query(static_cast<unsigned>(query_of(lane))) + static_cast<unsigned>(lane / 4 % 2),
                              static_cast<unsigned>(block), static_cast<unsigned>(lane / 8), kBelow);
      for (int lane = 0; lane < 32; ++lane) {
        const unsigned kept = core::dropout_joined(own[lane], own[lane ^ 4], lane / 4 % 2 != 0);
        for (int n = 0; n < 8; ++n)
          for (int half = 0; half < 2; ++half)
            for (int e = 0; e < 2; ++e)
              EXPECT_EQ(kept >> (16 * e + 8 * half + n) & 1u, core::dropout_number(kSeed, kStream, query_of(lane) + 8 * half + e,
                                                                                   64 * block + lane / 4 + 8 * n) >= static_cast<int>(kBelow))
                  << "lane " << lane << ", key " << n << ", query " << half << ", " << e;
      }
    }
}

// And where queries are its rows: a lane's word is that of its two keys in each of eight blocks of 8, and its two rows.
TEST(DropoutSmall, FragmentsHaveTheBitsOfTheirPairs) {
  for (const unsigned below : {1u, 6554u, 40000u, 65535u})
    for (int lane = 0; lane < 32; ++lane) {
      const int row = 48 + lane / 4;
      const unsigned kept = kept_word(7, 9, core::dropout_query(static_cast<unsigned>(row)), 2, static_cast<unsigned>(lane % 4), below);
      for (int half = 0; half < 2; ++half)
        for (int n = 0; n < 8; ++n)
          for (int e = 0; e < 2; ++e)
            EXPECT_EQ(kept >> (8 * half + n + 16 * e) & 1u,
                      core::dropout_number(7, 9, row + 8 * half, 128 + 8 * n + lane % 4 * 2 + e) >= static_cast<int>(below));
    }
}

Tensor contiguous(std::vector<float>& data, std::initializer_list<int64_t> shape) { return Tensor(data.data(), DType::kF32, shape); }

// The weights of the reference, which are the mask where they are not 0.
std::vector<float> weights(double p, int64_t seed, int64_t offset, int64_t batch, int64_t nheads, int64_t seqlen_q, int64_t seqlen_k) {
  std::vector<float> q(static_cast<size_t>(batch * seqlen_q * nheads), 0), k(static_cast<size_t>(batch * seqlen_k * nheads), 0), o(q.size()),
      w(static_cast<size_t>(batch * nheads * seqlen_q * seqlen_k));
  const int64_t state[] = {seed, offset};
  ForwardTensors t;
  t.q = contiguous(q, {batch, seqlen_q, nheads, 1});
  t.k = t.v = contiguous(k, {batch, seqlen_k, nheads, 1});
  t.o = contiguous(o, {batch, seqlen_q, nheads, 1});
  t.weights = contiguous(w, {batch, nheads, seqlen_q, seqlen_k});
  t.scores.dropout_state = Tensor(state, DType::kI64, {2});
  Options options;
  options.backend = Backend::kReference;
  options.p_dropout = p;
  forward(t, options);
  return w;
}

TEST(DropoutSmall, TheMaskIsReturned) {
  constexpr int64_t kBatch = 2, kHeads = 3, kQueries = 20, kKeys = 130;
  std::vector<uint8_t> mask(kBatch * kHeads * kQueries * kKeys + 1, 7);
  const auto fill = [&](double p) { return fattn_dropout_mask(-5, int64_t{1} << 40, p, kBatch, kHeads, kQueries, kKeys, mask.data()); };
  ASSERT_EQ(fill(0.3), FATTN_OK);
  const Dropout dropout{static_cast<uint64_t>(-5), uint64_t{1} << 40, 0.3};
  size_t at = 0;
  for (int64_t batch = 0; batch < kBatch; ++batch)
    for (int64_t head = 0; head < kHeads; ++head)
      for (int64_t query = 0; query < kQueries; ++query)
        for (int64_t key = 0; key < kKeys; ++key, ++at) ASSERT_EQ(mask[at], dropout.kept(batch, kHeads, head, query, key) != 0) << at;
  EXPECT_EQ(mask[at], 7);
  ASSERT_EQ(fill(0), FATTN_OK);
  EXPECT_EQ(std::count(mask.begin(), mask.end(), 1), static_cast<int64_t>(at));
  const auto refused = [](fattn_status status, const char* words) {
    EXPECT_EQ(status, FATTN_ERROR_INVALID_ARGUMENT);
    EXPECT_NE(std::string(fattn_last_error()).find(words), std::string::npos) << fattn_last_error();
  };
  refused(fill(1), "p_dropout is 1; allowed: 0 (none) to 1 - 2^-16");
  refused(fill(NAN), "p_dropout is nan");
  refused(fattn_dropout_mask(0, 0, 0.5, 1, -1, 1, 1, mask.data()), "nheads is -1; allowed: 0 to 2^31 - 1");
  refused(fattn_dropout_mask(0, 0, 0.5, 1 << 30, 1 << 30, 1 << 30, 1, mask.data()), "more elements than memory");
  refused(fattn_dropout_mask(0, 0, 0.5, 1, 1, 1, 1, nullptr), "mask is a null pointer");
  EXPECT_EQ(fattn_dropout_mask(0, 0, 0.5, 1, 0, 1, 1, nullptr), FATTN_OK);
}

TEST(DropoutSmall, DropsItsShareAndScalesTheRest) {
  constexpr int64_t kSeqlen = 256;
  for (double p : {0.03, 0.1, 0.5, 0.9}) {
    const std::vector<float> w = weights(p, 3, 4, 2, 3, kSeqlen, kSeqlen);
    const auto steps = std::round(p * 65536);
    double dropped = 0;
    for (float x : w) {
      dropped += x == 0;
      if (x != 0) {
        ASSERT_FLOAT_EQ(x, static_cast<float>(65536 / (65536 - steps) / kSeqlen));
      }
    }
    const auto n = static_cast<double>(w.size());
    EXPECT_NEAR(dropped / n, p, 5 * std::sqrt(p * (1 - p) / n)) << p;
  }
}

TEST(DropoutSmall, SeedOffsetEntryAndHeadGiveOtherNumbers) {
  const std::vector<float> w = weights(0.5, 3, 4, 2, 2, 64, 64), seed = weights(0.5, 4, 4, 2, 2, 64, 64), offset = weights(0.5, 3, 5, 2, 2, 64, 64);
  EXPECT_EQ(w, weights(0.5, 3, 4, 2, 2, 64, 64));
  const auto agreement = [](auto a, auto b, int64_t n) {
    int64_t same = 0;
    for (int64_t i = 0; i < n; ++i) same += (a[i] == 0) == (b[i] == 0);
    return static_cast<double>(same) / static_cast<double>(n);
  };
  constexpr int64_t kHead = 64 * 64;
  EXPECT_NEAR(agreement(w.data(), seed.data(), 4 * kHead), 0.5, 0.03);
  EXPECT_NEAR(agreement(w.data(), w.data() + kHead, kHead), 0.5, 0.05);
  EXPECT_NEAR(agreement(w.data(), w.data() + 2 * kHead, kHead), 0.5, 0.05);
  // An offset moves on by as many (batch entry, head).
  EXPECT_EQ(agreement(w.data() + kHead, offset.data(), 3 * kHead), 1.0);
}

TEST(DropoutSmall, LessThanAStepDropsNothing) {
  const std::vector<float> w = weights(1e-6, 3, 4, 1, 1, 64, 64);
  EXPECT_EQ(std::count(w.begin(), w.end(), 0.0f), 0);
}

}  // namespace
}  // namespace fattn::testing
