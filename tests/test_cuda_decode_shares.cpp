// How sequences of different lengths are shared among CTAs of decode on a GPU (kernels/decode/shares.h), thread by thread, without one.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "emulated/device.h"
//
#include "kernels/decode/shares.h"

namespace fattn {
namespace {

constexpr int kBlockN = 16, kTeams = 4;

// What a CTA was given of a sequence.
struct Visit {
  int cta = 0, batch = 0;
  DecodeShare share = {};
  bool last = false;
};

// Of all CTAs of a key head; each of their threads must be told the same.
std::vector<Visit> shares_of(const std::vector<int>& lengths, int seqlen_k, int ctas, int64_t stride = 1) {
  std::vector<int> memory(lengths.size() * static_cast<size_t>(stride), -7);
  for (size_t i = 0; i < lengths.size(); ++i) memory[i * static_cast<size_t>(stride)] = lengths[i];
  AttentionParams p{};
  p.batch = static_cast<int>(lengths.size());
  p.seqlen_k = seqlen_k;
  DecodeWork work{};
  work.lengths = memory.data();
  work.length_stride = stride;
  work.splits = ctas;
  constexpr size_t kThreads = 32;
  std::vector<std::vector<Visit>> found(static_cast<size_t>(ctas) * kThreads);
  emulated::run(ctas, kThreads, [&] {
    std::vector<Visit>& mine = found[blockIdx.x * kThreads + threadIdx.x];
    const int cta = static_cast<int>(blockIdx.x);
    const int lane = static_cast<int>(threadIdx.x);
    for (decode::Walk at = decode::first_of<kBlockN, kTeams>(p, work, cta, lane); at.has_share(p, cta);) {
      const auto [share, next, length] = decode::share_at<kBlockN>(p, work, cta, at);
      mine.push_back({cta, at.batch, share, !next.has_share(p, cta)});
      at = next;
    }
  });
  std::vector<Visit> all;
  for (size_t i = 0; i < found.size(); ++i) {
    const auto& first = found[i / kThreads * kThreads];
    const bool same = std::equal(found[i].begin(), found[i].end(), first.begin(), first.end(), [](const Visit& a, const Visit& b) {
      return a.batch == b.batch && a.share.first == b.share.first && a.share.end == b.share.end && a.share.split == b.share.split &&
             a.share.splits == b.share.splits && a.last == b.last;
    });
    EXPECT_TRUE(same) << "thread " << i % kThreads << " of CTA " << i / kThreads;
    if (i % kThreads == 0) all.insert(all.end(), found[i].begin(), found[i].end());
  }
  return all;
}

// Every step is one CTA's, the CTAs of a sequence are numbered without gaps, no two parts are in one place, and no CTA has more than its share.
void expect_whole(const std::vector<int>& lengths, int seqlen_k, int ctas, int64_t stride = 1) {
  const std::vector<Visit> visits = shares_of(lengths, seqlen_k, ctas, stride);
  int64_t units = 0;
  std::vector<std::vector<int>> taken;
  for (const int length : lengths) {
    const int keys = length < 0 || length > seqlen_k ? 0 : length;
    taken.emplace_back(static_cast<size_t>(std::max(1, (keys + kBlockN - 1) / kBlockN)));
    units += kDecodeStart + static_cast<int64_t>(taken.back().size());
  }
  const int64_t most = std::max<int64_t>((units + ctas - 1) / ctas, kDecodeStart + kTeams);
  std::vector<int64_t> of_cta(static_cast<size_t>(ctas)), last(static_cast<size_t>(ctas));
  std::vector<int> splits(lengths.size()), next(lengths.size());
  std::set<int> parts;
  for (const Visit& v : visits) {
    const auto batch = static_cast<size_t>(v.batch), cta = static_cast<size_t>(v.cta);
    ASSERT_LT(v.share.first, v.share.end);
    ASSERT_LE(v.share.end, static_cast<int>(taken[batch].size()));
    for (int step = v.share.first; step < v.share.end; ++step) ++taken[batch][static_cast<size_t>(step)];
    of_cta[cta] += v.share.end - v.share.first;
    EXPECT_FALSE(last[cta]) << "CTA " << v.cta << " had been told that it has no more";
    last[cta] = v.last;
    EXPECT_EQ(v.share.split, next[batch]++) << "sequence " << v.batch;
    EXPECT_TRUE(splits[batch] == 0 || splits[batch] == v.share.splits);
    splits[batch] = v.share.splits;
    EXPECT_TRUE(parts.insert(v.cta + v.batch).second) << "part " << v.cta + v.batch << " is two CTAs'";
    EXPECT_LT(v.cta + v.batch, decode_parts(ctas, static_cast<long long>(lengths.size())));
  }
  EXPECT_EQ(splits, next);
  for (const auto& steps : taken) EXPECT_EQ(std::count(steps.begin(), steps.end(), 1), static_cast<int64_t>(steps.size()));
  for (size_t cta = 0; cta < of_cta.size(); ++cta) {
    EXPECT_LE(of_cta[cta], most);
    EXPECT_EQ(last[cta], of_cta[cta] > 0) << "CTA " << cta;
  }
}

TEST(DecodeShares, EveryStepIsOneCtasAtAnyLengths) {
  std::mt19937 random(1);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  for (int turn = 0; turn < 60; ++turn) {
    const int seqlen_k = 1 + below(turn % 3 == 0 ? 100 : 5000), ctas = 1 + below(turn % 2 == 0 ? 5 : 40);
    std::vector<int> lengths(static_cast<size_t>(1 + below(turn % 4 == 0 ? 100 : 12)));
    for (int& length : lengths) {
      const int kind = below(8);
      length = kind == 0   ? 0
               : kind == 1 ? seqlen_k
               : kind == 2 ? -1 - below(9)
               : kind == 3 ? seqlen_k + 1 + below(9)
               : kind == 4 ? below(20)
                           : below(seqlen_k + 1);
    }
    SCOPED_TRACE("turn " + std::to_string(turn));
    expect_whole(lengths, seqlen_k, ctas, 1 + turn % 2);
    if (HasFailure()) return;
  }
}

TEST(DecodeShares, EdgesAreShared) {
  for (const size_t batch : {1, 2, 31, 32, 33, 64, 65})
    for (const int ctas : {1, 2, 33}) {
      expect_whole(std::vector<int>(batch, 0), 100, ctas);
      expect_whole(std::vector<int>(batch, -1), 100, ctas);
      expect_whole(std::vector<int>(batch, 1), 1, ctas);
      expect_whole(std::vector<int>(batch, 3000), 3000, ctas);
    }
  std::vector<int> one_long(70);
  one_long[69] = 20000;
  expect_whole(one_long, 20000, 33);
  std::swap(one_long[69], one_long[0]);
  expect_whole(one_long, 20000, 33);
}

// A sequence as long as all others together takes as many CTAs as these, and few keys are one CTA's.
TEST(DecodeShares, CtasAreSharedByLength) {
  std::vector<int> lengths(8, 1000 * kBlockN);
  lengths[3] = 7000 * kBlockN;
  int of_long = 0;
  for (const Visit& v : shares_of(lengths, 7000 * kBlockN, 40)) of_long += v.batch == 3;
  EXPECT_NEAR(of_long, 20, 1);
  for (const Visit& v : shares_of({kTeams * kBlockN, 5}, 1 << 20, 33)) EXPECT_TRUE(v.share.splits == 1 || v.batch == 1);
  EXPECT_EQ(shares_of({kTeams * kBlockN}, 1 << 20, 33).size(), 1u);
}

}  // namespace
}  // namespace fattn
