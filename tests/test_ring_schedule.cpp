// The schedule of ring attention: over all ranks every pair that the mask shows is computed once, and no key travels that nobody sees.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "fattn/fattn.hpp"
#include "ring/schedule.h"
#include "testing/random.h"

namespace fattn::core::ring {
namespace {

struct Given {
  fattn_ring_problem problem{};
  std::vector<int64_t> cu_q, cu_k;

  Given(int32_t nranks, int32_t layout, int64_t seqlen_q, int64_t seqlen_k) {
    problem.struct_size = sizeof problem;
    problem.nranks = nranks;
    problem.layout = layout;
    problem.seqlen_q = seqlen_q;
    problem.seqlen_k = seqlen_k;
  }
  Given& window(int64_t left, int64_t right) {
    problem.has_window = 1;
    problem.window_left = left;
    problem.window_right = right;
    return *this;
  }
  Schedule of(int32_t rank) {
    problem.rank = rank;
    problem.nsequences = cu_q.empty() ? 0 : static_cast<int32_t>(cu_q.size()) - 1;
    problem.cu_seqlens_q = cu_q.empty() ? nullptr : cu_q.data();
    problem.cu_seqlens_k = cu_q.empty() ? nullptr : cu_k.data();
    return make_schedule(problem);
  }
  // By docs/NUMERICS.md, of one sequence after the other.
  bool visible(int64_t i, int64_t j) const {
    std::vector<int64_t> q{0, problem.seqlen_q}, k{0, problem.seqlen_k};
    if (!cu_q.empty()) q = cu_q, k = cu_k;
    for (size_t s = 0; s + 1 < q.size(); ++s) {
      if (i < q[s] || i >= q[s + 1] || j < k[s] || j >= k[s + 1]) continue;
      const int64_t seqlen_q = q[s + 1] - q[s], seqlen_k = k[s + 1] - k[s], distance = (j - k[s]) - (i - q[s] + seqlen_k - seqlen_q);
      if (problem.causal && distance > 0) return false;
      if (!problem.has_window) return true;
      const bool left = problem.window_left < 0 || -distance <= problem.window_left,
                 right = problem.window_right < 0 || distance <= problem.window_right;
      return left && (right || problem.causal);
    }
    return false;
  }
  std::string name() const {
    std::string s = "ranks " + std::to_string(problem.nranks) + ", layout " + std::to_string(problem.layout) + ", " +
                    std::to_string(problem.seqlen_q) + " x " + std::to_string(problem.seqlen_k) + (problem.causal ? ", causal" : "") +
                    (problem.gathered ? ", gathered" : "") + (problem.has_alibi ? ", alibi" : "") + (problem.keep_positions ? ", positions" : "");
    if (problem.has_window) s += ", window " + std::to_string(problem.window_left) + " " + std::to_string(problem.window_right);
    for (size_t i = 0; i < cu_q.size(); ++i) s += (i ? " " : ", packed ") + std::to_string(cu_q[i]) + "/" + std::to_string(cu_k[i]);
    return s;
  }
};

std::vector<int64_t> positions(const Range* ranges, int64_t count) {
  std::vector<int64_t> all;
  for (int64_t i = 0; i < count; ++i)
    for (int64_t j = 0; j < ranges[i].count; ++j) all.push_back(ranges[i].first + j);
  return all;
}
std::vector<int64_t> positions(const std::vector<Range>& ranges) { return positions(ranges.data(), static_cast<int64_t>(ranges.size())); }

using Pairs = std::map<std::pair<int64_t, int64_t>, int>;

// What a call of attention on these rows computes.
void count_pairs(const Given& given, const Block& b, const std::vector<int64_t>& queries, const std::vector<int64_t>& keys, Pairs& pairs) {
  ASSERT_LE(b.q_row + b.q_rows, static_cast<int64_t>(queries.size()));
  ASSERT_LE(b.k_row + b.k_rows, static_cast<int64_t>(keys.size()));
  ASSERT_TRUE(b.window_left >= -1 && b.window_right >= -1 && b.q_rows > 0 && b.k_rows > 0);
  const int64_t aligned = b.k_rows - b.q_rows;
  std::vector<bool> seen(static_cast<size_t>(b.k_rows));
  for (int64_t i = 0; i < b.q_rows; ++i) {
    bool sees = false;
    for (int64_t j = 0; j < b.k_rows; ++j) {
      const int64_t distance = j - (i + aligned);
      const int64_t global = b.distance + i - j;  // as ALiBi counts
      if (given.problem.has_alibi) {
        ASSERT_TRUE(b.side == 0 ? global == -distance : b.side > 0 ? global >= 0 : global <= 0);
      }
      if ((b.window_left >= 0 && -distance > b.window_left) || (b.window_right >= 0 && distance > b.window_right)) continue;
      sees = seen[static_cast<size_t>(j)] = true;
      const int64_t q = queries[static_cast<size_t>(b.q_row + i)], k = keys[static_cast<size_t>(b.k_row + j)];
      if (given.problem.keep_positions || given.problem.has_alibi) {
        ASSERT_EQ(q, b.q_position + i);
        ASSERT_EQ(k, b.k_position + j);
      }
      ++pairs[{q, k}];
    }
    EXPECT_TRUE(sees) << "a query of a block that sees nothing";
  }
  EXPECT_TRUE(std::find(seen.begin(), seen.end(), false) == seen.end()) << "a key of a block that nobody sees";
}

void check_rank(Given& given, const std::vector<Schedule>& all, int32_t rank, Pairs& pairs) {
  const Schedule& mine = all[static_cast<size_t>(rank)];
  const std::vector<int64_t> queries = positions(mine.held_q), own = positions(mine.held_k);
  const Range* received = mine.received.data();
  const Block* blocks = mine.blocks.data();
  ASSERT_EQ(static_cast<int32_t>(mine.hops.size()), given.problem.nranks);
  std::vector<int64_t> known = own;
  for (size_t h = 0; h < mine.hops.size(); ++h) {
    const Hop& hop = mine.hops[h];
    const std::vector<int64_t> came = positions(received, hop.nreceived);
    received += hop.nreceived;
    ASSERT_EQ(hop.rows_received, static_cast<int64_t>(came.size()));
    // What the other sends is what this one waits for, row by row.
    const Schedule& theirs = all[static_cast<size_t>(hop.receive_from)];
    const std::vector<int64_t> held = positions(theirs.held_k);
    std::vector<int64_t> sent;
    size_t range = 0;
    for (size_t i = 0; i < h; ++i) range += static_cast<size_t>(theirs.hops[i].nsent);
    for (int64_t i = 0; i < theirs.hops[h].nsent; ++i)
      for (int64_t j = 0; j < theirs.sent[range + static_cast<size_t>(i)].count; ++j)
        sent.push_back(held[static_cast<size_t>(theirs.sent[range + static_cast<size_t>(i)].first + j)]);
    EXPECT_EQ(theirs.hops[h].rows_sent, static_cast<int64_t>(sent.size()));
    EXPECT_EQ(sent, came);
    if (h > 0) {
      EXPECT_EQ(theirs.hops[h].send_to, rank);
    }
    for (int64_t j : came)
      EXPECT_TRUE(std::any_of(queries.begin(), queries.end(), [&](int64_t i) { return given.visible(i, j); }))
          << "key " << j << " travels for nothing";
    known.insert(known.end(), came.begin(), came.end());
    std::vector<int64_t> keys = h == 0 ? own : came;
    if (given.problem.gathered) keys = positions({{0, given.problem.seqlen_k}});
    for (int64_t i = 0; i < hop.nblocks; ++i) count_pairs(given, *blocks++, queries, keys, pairs);
  }
  ASSERT_EQ(blocks, mine.blocks.data() + mine.blocks.size());
  std::sort(known.begin(), known.end());
  for (const auto& [pair, times] : pairs)
    if (std::find(queries.begin(), queries.end(), pair.first) != queries.end()) {
      EXPECT_TRUE(std::binary_search(known.begin(), known.end(), pair.second)) << "key " << pair.second << " is used and never came";
    }
}

void check(Given given) {
  SCOPED_TRACE(given.name());
  std::vector<Schedule> all;
  for (int32_t rank = 0; rank < given.problem.nranks; ++rank) all.push_back(given.of(rank));
  std::vector<int64_t> held_q, held_k;
  for (const Schedule& s : all) {
    for (int64_t i : positions(s.held_q)) held_q.push_back(i);
    for (int64_t i : positions(s.held_k)) held_k.push_back(i);
  }
  std::sort(held_q.begin(), held_q.end());
  std::sort(held_k.begin(), held_k.end());
  ASSERT_EQ(held_q, positions({{0, given.problem.seqlen_q}}));
  ASSERT_EQ(held_k, positions({{0, given.problem.seqlen_k}}));
  Pairs pairs;
  for (int32_t rank = 0; rank < given.problem.nranks; ++rank) check_rank(given, all, rank, pairs);
  for (int64_t i = 0; i < given.problem.seqlen_q; ++i)
    for (int64_t j = 0; j < given.problem.seqlen_k; ++j) {
      const auto found = pairs.find({i, j});
      ASSERT_EQ(found == pairs.end() ? 0 : found->second, given.visible(i, j) ? 1 : 0) << "query " << i << ", key " << j;
    }
}

// One of the ways that change the blocks and not the pairs.
constexpr int kWays = 6;
void check_way(Given given, int way) {
  given.problem.gathered = way % 2;
  given.problem.has_alibi = way / 2 == 1;
  given.problem.keep_positions = way / 2 == 2;
  check(given);
}
void check_all_ways(const Given& given) {
  for (int way = 0; way < kWays && !::testing::Test::HasFailure(); ++way) check_way(given, way);
}

TEST(RingScheduleSmall, EveryPairOnce) {
  int windows = 0;  // they take ways by turns
  for (int32_t nranks = 1; nranks <= 8; ++nranks)
    for (const int32_t layout : {FATTN_RING_CONTIGUOUS, FATTN_RING_ZIGZAG})
      for (const auto& [seqlen_q, seqlen_k] :
           {std::pair<int64_t, int64_t>{0, 0}, {1, 1}, {3, 3}, {16, 16}, {37, 37}, {5, 23}, {23, 5}, {0, 4}, {4, 0}})
        for (const int32_t causal : {0, 1}) {
          Given given(nranks, layout, seqlen_q, seqlen_k);
          given.problem.causal = causal;
          check_all_ways(given);
          for (const auto& [left, right] : {std::pair<int64_t, int64_t>{0, 0}, {4, 0}, {7, 3}, {-1, 2}, {2, -1}, {1000, 1000}})
            check_way(Given(given).window(left, right), windows++ % kWays);
          if (HasFailure()) return;
        }
}

TEST(RingScheduleSmall, PackedSequences) {
  testing::Random random(43, 0);
  uint64_t drawn = 0;
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random.uniform(drawn++) * static_cast<double>(n)); };
  for (int round = 0; round < 300 && !HasFailure(); ++round) {
    std::vector<int64_t> cu_q{0}, cu_k{0};
    const bool same = below(2) == 0;
    for (int64_t i = 0, n = below(6); i < n; ++i) {
      cu_q.push_back(cu_q.back() + below(14));
      cu_k.push_back(same ? cu_q.back() : cu_k.back() + below(14));
    }
    // Rows behind the last sequence belong to none.
    Given given(static_cast<int32_t>(1 + below(8)), static_cast<int32_t>(below(2)), cu_q.back() + below(3), cu_k.back() + below(3));
    given.cu_q = cu_q;
    given.cu_k = cu_k;
    given.problem.causal = static_cast<int32_t>(below(2));
    if (below(2) == 0) given.window(below(9) - 1, below(9) - 1);
    check_all_ways(given);
  }
}

TEST(RingScheduleSmall, WindowsTravelToNeighboursOnly) {
  Given given(8, FATTN_RING_CONTIGUOUS, 800, 800);
  given.problem.causal = 1;
  given.window(30, 0);
  const Schedule s = given.of(3);
  ASSERT_EQ(s.hops[1].rows_received, 30);
  for (size_t h = 2; h < 8; ++h) EXPECT_EQ(s.hops[h].rows_received, 0);
}

// The work of a causal mask is the same for all ranks, and nearly every hop is one call.
TEST(RingScheduleSmall, ZigzagIsBalanced) {
  Given given(4, FATTN_RING_ZIGZAG, 800, 800);
  given.problem.causal = 1;
  std::vector<double> work;
  for (int32_t rank = 0; rank < 4; ++rank) {
    const Schedule s = given.of(rank);
    double pairs = 0;
    for (const Block& b : s.blocks)
      pairs += static_cast<double>(b.q_rows) * static_cast<double>(b.window_right == 0 ? b.k_rows + 1 : 2 * b.k_rows) / 2;
    work.push_back(pairs);
    for (const Hop& hop : s.hops) EXPECT_EQ(hop.nblocks, 1);
  }
  for (const double x : work) EXPECT_EQ(x, work[0]);
}

TEST(RingScheduleSmall, ManyPositions) {
  Given given(8, FATTN_RING_ZIGZAG, (int64_t{1} << 60), (int64_t{1} << 60));
  given.problem.causal = 1;
  const Schedule s = given.of(7);
  EXPECT_EQ(s.held_q.size(), 1u);
  EXPECT_EQ(s.held_q[0].count, int64_t{1} << 57);
}

void expect_refused(const Given& changed, const std::string& words) {
  Given given = changed;
  try {
    given.of(changed.problem.rank);
    ADD_FAILURE() << "accepted: " << words;
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(e.what()).find(words), std::string::npos) << e.what();
  }
}

TEST(RingScheduleSmall, Refused) {
  Given given(4, 0, 10, 10);
  expect_refused(Given(0, 0, 10, 10), "nranks is 0; allowed: 1 to 65536");
  expect_refused(Given(4, 2, 10, 10), "layout is 2; allowed: 0 (contiguous), 1 (zigzag)");
  expect_refused(Given(4, 0, -1, 10), "seqlen_q is -1");
  expect_refused(Given(4, 0, 10, INT64_MAX), "seqlen_k is 9223372036854775807");
  given.problem.rank = 4;
  expect_refused(given, "rank is 4; allowed: 0 to nranks - 1, 3");
  given.problem.rank = 0;
  expect_refused(Given(given).window(-2, 0), "window_left is -2");
  given.cu_q = {0, 4, 3}, given.cu_k = {0, 4, 8};
  expect_refused(given, "cu_seqlens_q[2] is 3 and the one before it 4");
  given.cu_q = {0, 4, 11};
  expect_refused(given, "cu_seqlens_q[2] is 11; there are 10 positions");
  given.cu_q = {1, 4, 8};
  expect_refused(given, "cu_seqlens_q[0] is 1; it must be 0");
}

TEST(RingScheduleSmall, CAbi) {
  fattn_ring_problem problem{};
  fattn_ring* ring = nullptr;
  EXPECT_EQ(fattn_ring_create(&problem, &ring), FATTN_ERROR_ABI);
  problem.struct_size = sizeof problem;
  EXPECT_EQ(fattn_ring_create(&problem, &ring), FATTN_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(ring, nullptr);
  problem.nranks = 2;
  problem.seqlen_q = problem.seqlen_k = 7;
  ASSERT_EQ(fattn_ring_create(&problem, &ring), FATTN_OK);
  fattn_ring_schedule schedule{};
  EXPECT_EQ(fattn_ring_query(ring, &schedule), FATTN_ERROR_ABI);
  schedule.struct_size = sizeof schedule;
  ASSERT_EQ(fattn_ring_query(ring, &schedule), FATTN_OK);
  EXPECT_EQ(schedule.nhops, 2);
  EXPECT_EQ(schedule.rows_q, 3);
  EXPECT_EQ(schedule.nblocks, 2);
  EXPECT_EQ(schedule.blocks[1].k_rows, 4);
  EXPECT_EQ(schedule.hops[1].rows_sent, 3);
  fattn_ring_destroy(ring);
  fattn_ring_destroy(nullptr);
}

}  // namespace
}  // namespace fattn::core::ring
