// Validation's parts: overlap of strided views against brute force, mask geometry, costs.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <set>
#include <string>

#include "device_abi/mask.h"
#include "fattn/problem.hpp"
#include "problem/overlap.h"
#include "problem/problem.h"
#include "testing/random.h"

namespace fattn::core {
namespace {

// Byte addresses of every element.
std::vector<int64_t> addresses(int64_t base, const Extent& e) {
  std::vector<int64_t> all{base};
  for (int d = 0; d < e.ndim; ++d) {
    std::vector<int64_t> next;
    for (int64_t a : all)
      for (int64_t i = 0; i < e.shape[d]; ++i) next.push_back(a + i * e.strides[d] * e.element_size);
    all = next;
  }
  return all;
}

bool share_a_byte(int64_t a, const Extent& ea, int64_t b, const Extent& eb) {
  std::set<int64_t> bytes;
  for (int64_t at : addresses(a, ea))
    for (int64_t i = 0; i < ea.element_size; ++i) bytes.insert(at + i);
  for (int64_t at : addresses(b, eb))
    for (int64_t i = 0; i < eb.element_size; ++i)
      if (bytes.count(at + i)) return true;
  return false;
}

class Draw {
 public:
  explicit Draw(uint64_t seed) : random_(seed, 0) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(random_.uniform(next_++) * static_cast<double>(n)); }

 private:
  testing::Random random_;
  uint64_t next_ = 0;
};

// A view as tensor libraries make them: dimensions of a padded tensor in any order.
Extent nested(Draw& draw) {
  Extent e;
  e.ndim = 4;
  e.element_size = 4;
  int order[4] = {0, 1, 2, 3};
  for (int i = 3; i > 0; --i) std::swap(order[i], order[draw.below(i + 1)]);
  int64_t stride = 1;
  for (int d : order) {
    e.shape[d] = 1 + draw.below(4);
    e.strides[d] = stride;
    stride *= e.shape[d] + draw.below(3);
  }
  return e;
}

const void* pointer(int64_t address) { return reinterpret_cast<const void*>(static_cast<uintptr_t>(address)); }

// "No" must be certain for any two views.
TEST(OverlapSmall, NeverMissesASharedByte) {
  Draw draw(1);
  int shared = 0;
  for (int round = 0; round < 20000; ++round) {
    const Extent a = nested(draw), b = nested(draw);
    const int64_t at = 4096 + draw.below(200);
    const bool truth = share_a_byte(4096, a, at, b);
    shared += truth;
    if (truth) {
      ASSERT_TRUE(may_overlap(pointer(4096), a, pointer(at), b)) << "round " << round;
      ASSERT_TRUE(may_overlap(pointer(at), b, pointer(4096), a)) << "round " << round;
    }
  }
  EXPECT_GT(shared, 1000);
}

// "Yes" must be true for views of one tensor: the same strides, other offsets and shapes.
TEST(OverlapSmall, IsExactForSlicesOfOneTensor) {
  Draw draw(2);
  int apart = 0;
  for (int round = 0; round < 20000; ++round) {
    const Extent a = nested(draw);
    Extent b = a;
    int64_t at = 4096;
    Extent first = a;
    for (int d = 0; d < 4; ++d) {
      // first = a[d][0:n], second = a[d][m:]
      first.shape[d] = 1 + draw.below(a.shape[d]);
      const int64_t skip = draw.below(a.shape[d]);
      b.shape[d] = a.shape[d] - skip;
      at += skip * a.strides[d] * 4;
    }
    const bool truth = share_a_byte(4096, first, at, b);
    apart += !truth;
    ASSERT_EQ(may_overlap(pointer(4096), first, pointer(at), b), truth) << "round " << round;
  }
  EXPECT_GT(apart, 1000);
}

TEST(OverlapSmall, SelfOverlapIsFound) {
  Draw draw(3);
  for (int round = 0; round < 20000; ++round) {
    Extent e = nested(draw);
    EXPECT_FALSE(overlaps_itself(e)) << "round " << round;
    for (int d = 0; d < 4; ++d) e.strides[d] = draw.below(8);
    const std::vector<int64_t> all = addresses(0, e);
    const bool truth = std::set<int64_t>(all.begin(), all.end()).size() < all.size();
    if (truth) {
      ASSERT_TRUE(overlaps_itself(e)) << "round " << round;
    }
  }
}

TEST(OverlapSmall, SpansAndTheirOverflow) {
  Extent e{2, {3, 5}, {10, 1}, 2};
  EXPECT_EQ(span_bytes(e), 2 * 25);
  e.shape[0] = 0;
  EXPECT_EQ(span_bytes(e), 0);
  EXPECT_EQ(span_bytes({2, {int64_t{1} << 40, int64_t{1} << 40}, {int64_t{1} << 40, 1}, 4}), -1);
  EXPECT_EQ(span_bytes({1, {int64_t{1} << 62}, {1}, 2}), -1);
  EXPECT_EQ(span_bytes({1, {int64_t{1} << 61}, {1}, 2}), int64_t{1} << 62);
}

TEST(MaskSmall, AgreesWithItsDefinition) {
  constexpr int64_t kLimits[] = {-1, 0, 1, 2, 5};
  for (int64_t seqlen_q = 0; seqlen_q < 9; ++seqlen_q)
    for (int64_t seqlen_k = 0; seqlen_k < 9; ++seqlen_k)
      for (bool causal : {false, true})
        for (int64_t left : kLimits)
          for (int64_t right : kLimits) {
            SCOPED_TRACE(std::to_string(seqlen_q) + " " + std::to_string(seqlen_k) + (causal ? " causal " : " ") + std::to_string(left) + " " +
                         std::to_string(right));
            // Limits below the lengths, as Mask wants them.
            if (left >= std::max<int64_t>(seqlen_k, 1) || right >= std::max<int64_t>(seqlen_q, 1)) continue;
            const Mask mask{seqlen_q, seqlen_k, causal, left, right};
            const auto visible = [&](int64_t i, int64_t j) {
              const int64_t away = j - (i + seqlen_k - seqlen_q);
              return (!causal || away <= 0) && (left < 0 || away >= -left) && (causal || right < 0 || away <= right);
            };
            double pairs = 0;
            for (int64_t i = 0; i < seqlen_q; ++i) {
              ASSERT_LE(mask.visible_begin(i), mask.visible_end(i)) << "row " << i;
              for (int64_t j = 0; j < seqlen_k; ++j) {
                ASSERT_EQ(mask.visible_begin(i) <= j && j < mask.visible_end(i), visible(i, j)) << "row " << i << " key " << j;
                ASSERT_EQ(mask.first_row(j) <= i && i < mask.row_end(j), visible(i, j)) << "row " << i << " key " << j;
                pairs += visible(i, j);
              }
            }
            ASSERT_EQ(mask.visible_pairs(), pairs);
          }
}

// Windows as they are given, and what stays of them.
TEST(ValidateSmall, AWindowIsSaidInOneWay) {
  ForwardTensors t;
  t.q = t.o = Tensor(nullptr, DType::kF32, {1, 5, 1, 8});
  t.k = t.v = Tensor(nullptr, DType::kF32, {1, 9, 1, 8});
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  struct Row {
    bool causal;
    int64_t left, right;
    bool causal_after;
    int64_t left_after, right_after;
  };
  for (const Row& r :
       {Row{false, -1, -1, false, -1, -1}, Row{false, 7, 3, false, 7, 3}, Row{false, 8, 4, false, -1, -1}, Row{false, kHuge, kHuge, false, -1, -1},
        Row{false, 3, 0, true, 3, -1}, Row{true, 3, 2, true, 3, -1}, Row{true, -1, 0, true, -1, -1}}) {
    Options options;
    options.causal = r.causal;
    options.window_left = r.left;
    options.window_right = r.right;
    const Problem p = validate(describe(t, options));
    EXPECT_EQ(p.causal, r.causal_after) << r.left << " " << r.right;
    EXPECT_EQ(p.window_left, r.left_after) << r.left << " " << r.right;
    EXPECT_EQ(p.window_right, r.right_after) << r.left << " " << r.right;
  }
}

Problem problem(bool backward, bool causal) {
  Problem p;
  p.backward = backward;
  p.dtype = DType::kBF16;
  p.batch = 2;
  p.seqlen_q = 3;
  p.seqlen_k = 5;
  p.nheads = 4;
  p.nheads_k = 2;
  p.headdim = 8;
  p.headdim_v = 16;
  p.causal = causal;
  p.want_lse = true;
  return p;
}

// What adds to the same elements of dbias is one piece of work, and nothing else is.
TEST(ValidateSmall, UnitsOfTheBackwardPassShareNoGradient) {
  Problem p = problem(true, false);  // batch 2, 4 query heads on 2 key heads
  EXPECT_EQ(p.backward_units(), 4);
  p.dbias = {true, DType::kF32, 2, 4, 3, {}};
  EXPECT_EQ(p.backward_units(), 4);
  p.dbias.batch = 1;
  EXPECT_EQ(p.backward_units(), 2);
  p.dbias.heads = 1;
  EXPECT_EQ(p.backward_units(), 1);
  p.dbias.batch = 2;
  EXPECT_EQ(p.backward_units(), 2);
}

// Nothing is reached by it, but an address formed with it must be one that a 16-byte copy can take.
TEST(ValidateSmall, AStrideAlongOneElementIsThatOfAnAlignedRow) {
  ForwardTensors t;
  t.q = Tensor(nullptr, DType::kBF16, {1, 1, 1, 60}, {7, 5, 3, 1});
  t.k = t.v = Tensor(nullptr, DType::kBF16, {1, 9, 1, 60}, {7, 72, 3, 1});
  t.o = t.q;
  const Problem p = validate(describe(t, Options()));
  EXPECT_EQ(p.q.batch, 64);
  EXPECT_EQ(p.q.row, 64);
  EXPECT_EQ(p.q.head, 64);
  EXPECT_EQ(p.k.row, 72);
}

TEST(CostSmall, CountsVisiblePairs) {
  const Cost full = cost_of(problem(false, false));
  EXPECT_EQ(full.flops, 2.0 * 4 * 15 * 2 * (8 + 16));
  EXPECT_EQ(full.flops_nominal, full.flops);
  const Cost causal = cost_of(problem(false, true));
  EXPECT_EQ(causal.flops, 2.0 * 4 * (3 + 4 + 5) * 2 * (8 + 16));
  EXPECT_EQ(causal.flops_nominal, full.flops / 2);
  EXPECT_EQ(cost_of(problem(true, true)).flops, 2.5 * causal.flops);
}

TEST(CostSmall, OfAWindowIsOfItsPairs) {
  Problem p = problem(false, false);
  p.window_left = 1;
  p.window_right = 1;
  // Query i is aligned with key i + 2 of 5: it sees 3 keys, the last one 2.
  EXPECT_EQ(cost_of(p).flops, 2.0 * 4 * (3 + 3 + 2) * 2 * (8 + 16));
  EXPECT_EQ(cost_of(p).flops_nominal, cost_of(p).flops);
}

TEST(CostSmall, CountsEveryTensorOnce) {
  const double q = 2 * 3 * 4 * 8 * 2, k = 2 * 5 * 2 * 8 * 2, v = 2 * 5 * 2 * 16 * 2, o = 2 * 3 * 4 * 16 * 2, lse = 2 * 4 * 3 * 4;
  EXPECT_EQ(cost_of(problem(false, false)).bytes, q + k + v + o + lse);
  EXPECT_EQ(cost_of(problem(true, false)).bytes, 2 * (q + k + v + o) + lse);
}

TEST(CostSmall, CountsWhatScoresDependOn) {
  Problem p = problem(true, false);
  const double plain = cost_of(p).bytes;
  p.bias = {true, DType::kF32, 1, 4, 3, {}};
  p.dbias = {true, DType::kBF16, 1, 1, 3, {}};
  p.pair_mask = {true, DType::kU8, 2, 1, 1, {}};
  EXPECT_EQ(cost_of(p).bytes - plain, 4 * 3 * 5 * 4 + 3 * 5 * 2 + 2 * 5);
}

TEST(CostSmall, DoesNotOverflow) {
  Problem p = problem(false, true);
  p.seqlen_q = p.seqlen_k = int64_t{1} << 40;
  EXPECT_NEAR(cost_of(p).flops / (2.0 * 4 * 0x1p79 * 2 * 24), 1.0, 1e-9);
}

}  // namespace
}  // namespace fattn::core
