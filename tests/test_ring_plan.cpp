// Plans of ring attention (fattn/ring.hpp) that are executed again: with other numbers, and after a call that threw.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "fattn/fattn.hpp"
#include "owned_tensor.h"
#include "ring_of_threads.h"
#include "testing/random.h"

namespace fattn::testing {
namespace {

// The rows of one rank.
struct Rows {
  Rows(const RingSchedule& held, int64_t headdim)
      : q(normal(DType::kF32, {1, held.rows_q, 2, headdim}, 1)),
        k(normal(DType::kF32, {1, held.rows_k, 1, headdim}, 2)),
        v(normal(DType::kF32, {1, held.rows_k, 1, headdim}, 3)),
        dout(normal(DType::kF32, {1, held.rows_q, 2, headdim}, 4)),
        o(DType::kF32, q.shape),
        lse(DType::kF32, {1, 2, held.rows_q}),
        dq(DType::kF32, q.shape),
        dk(DType::kF32, k.shape),
        dv(DType::kF32, v.shape) {}
  ForwardTensors forward() const { return {q.view(), k.view(), v.view(), o.view(), lse.view(), {}}; }
  BackwardTensors backward(const ScoreTensors& scores) const {
    return {q.view(), k.view(), v.view(), o.view(), lse.view(), dout.view(), dq.view(), dk.view(), dv.view(), scores};
  }
  Owned q, k, v, dout, o, lse, dq, dk, dv;
};

class Workspace {
 public:
  explicit Workspace(size_t bytes) : memory_(bytes + 256, 0x7f) {}
  void* get() { return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory_.data()) + 255) / 256 * 256); }

 private:
  std::vector<char> memory_;
};

// Masks beside dropout and multiples of slopes are copied; the next call has others. `row`: elements between rows of the mask.
void expect_read_anew(int64_t row) {
  RingSequence sequence;
  sequence.seqlen_q = sequence.seqlen_k = 300;
  Options options;
  options.causal = true;
  options.p_dropout = 0.25;
  options.num_threads = 1;
  run_ranks(3, false, [&](RingTransport& transport) {
    const RingSchedule held = ring_schedule(sequence, transport.rank(), transport.ranks());
    const Rows rows(held, 16);
    ForwardTensors f = rows.forward();
    const auto execute = [&](RingPlan& forward, RingPlan& backward) {
      Workspace workspace(std::max(forward.workspace_bytes(), backward.workspace_bytes()));
      forward.execute(f, workspace.get(), forward.workspace_bytes());
      backward.execute(rows.backward(f.scores), workspace.get(), backward.workspace_bytes());
      std::vector<char> all;
      for (const Owned* x : {&rows.o, &rows.lse, &rows.dq, &rows.dk, &rows.dv}) all.insert(all.end(), x->memory.begin(), x->memory.end());
      return all;
    };
    std::vector<Owned> masks, slopes;
    for (const int i : {0, 1}) {
      Owned mask(DType::kU8, {held.rows_q - 1, row});
      mask.memory.resize(mask.memory.size() + static_cast<size_t>(sequence.seqlen_k));
      const Random random(7, static_cast<uint64_t>(50 + i));
      for (size_t j = 0; j < mask.memory.size(); ++j) mask.memory[j] = random.uniform(j) > 0.3 ? 1 : 0;
      masks.push_back(std::move(mask));
      slopes.push_back(normal(DType::kF32, {2}, static_cast<uint64_t>(60 + i)));
    }
    Owned state(DType::kI64, {2});
    std::memset(state.memory.data(), 1, state.memory.size());
    f.scores.dropout_state = state.view();
    const auto take = [&](size_t mask, size_t slope) {
      f.scores.mask = Tensor(masks[mask].memory.data(), DType::kU8, {1, 1, held.rows_q, sequence.seqlen_k}, {0, 0, row, 1});
      f.scores.alibi_slopes = slopes[slope].view();
    };
    take(0, 0);
    RingPlan forward(transport, sequence, f, options), backward(transport, sequence, rows.backward(f.scores), options);
    std::vector<std::vector<char>> found;
    for (const auto& [mask, slope] : {std::pair<size_t, size_t>{0, 0}, {1, 0}, {0, 1}, {0, 0}}) {
      take(mask, slope);
      found.push_back(execute(forward, backward));
      RingPlan fresh(transport, sequence, f, options), fresh_backward(transport, sequence, rows.backward(f.scores), options);
      EXPECT_EQ(found.back(), execute(fresh, fresh_backward)) << "mask " << mask << ", slopes " << slope;
    }
    EXPECT_NE(found[1], found[0]);
    EXPECT_NE(found[2], found[0]);
    EXPECT_EQ(found[3], found[0]);
  });
}

TEST(RingPlanSmall, MasksAndSlopesAreReadAnew) {
  expect_read_anew(300);
  expect_read_anew(317);
}

// Rows of a mask that are one row, by a stride of 0, are those of a mask that has them all.
TEST(RingPlanSmall, RowsOfAMaskMayBeOne) {
  RingSequence sequence;
  sequence.seqlen_q = sequence.seqlen_k = 100;
  Options options;
  options.p_dropout = 0.25;
  run_ranks(2, false, [&](RingTransport& transport) {
    const RingSchedule held = ring_schedule(sequence, transport.rank(), transport.ranks());
    const Rows rows(held, 16);
    Owned mask(DType::kU8, {1, 1, held.rows_q, 100}), state(DType::kI64, {2});
    std::memset(state.memory.data(), 1, state.memory.size());
    for (int64_t i = 0; i < mask.size(); ++i) mask.memory[static_cast<size_t>(i)] = static_cast<char>(i % 100 % 3 != 0);
    const auto o_of = [&](const Tensor& given) {
      ForwardTensors f = rows.forward();
      f.scores.mask = given;
      f.scores.dropout_state = state.view();
      RingPlan plan(transport, sequence, f, options);
      Workspace workspace(plan.workspace_bytes());
      plan.execute(f, workspace.get(), plan.workspace_bytes());
      return rows.o.memory;
    };
    const auto all = o_of(mask.view());
    EXPECT_EQ(o_of(Tensor(mask.memory.data(), DType::kU8, {1, 1, held.rows_q, 100}, {0, 0, 0, 1})), all);
  });
}

// A mask whose rows lie far apart, or whose heads are one, takes a copy of no more than its own bytes and a few rows; results are the same bits.
TEST(RingPlanSmall, MasksAreCopiedWithoutGaps) {
  RingSequence sequence;
  sequence.seqlen_q = sequence.seqlen_k = 100;
  Options options;
  options.p_dropout = 0.25;
  options.num_threads = 1;
  run_ranks(2, false, [&](RingTransport& transport) {
    const RingSchedule held = ring_schedule(sequence, transport.rank(), transport.ranks());
    const Rows rows(held, 16);
    Owned state(DType::kI64, {2});
    std::memset(state.memory.data(), 1, state.memory.size());
    struct Found {
      std::vector<char> all;
      int64_t bytes = 0;
    };
    const auto found = [&](bool one_head, int64_t of_head, int64_t of_row) {
      const int64_t heads = one_head && of_head > 0 ? 1 : 2, m = held.rows_q;
      std::vector<char> memory(static_cast<size_t>((heads - 1) * of_head + (m - 1) * of_row + 100), 0x7f);
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t i = 0; i < m; ++i)
          for (int64_t j = 0; j < 100; ++j)
            memory[static_cast<size_t>(h * of_head + i * of_row + j)] = ((one_head ? 0 : h) + i + j) % 3 != 0 || i + j == 8;
      ForwardTensors f = rows.forward();
      f.scores.mask = Tensor(memory.data(), DType::kU8, {1, heads, m, 100}, {heads * of_head, of_head, of_row, 1});
      f.scores.dropout_state = state.view();
      RingPlan forward(transport, sequence, f, options), backward(transport, sequence, rows.backward(f.scores), options);
      Workspace workspace(std::max(forward.workspace_bytes(), backward.workspace_bytes()));
      forward.execute(f, workspace.get(), forward.workspace_bytes());
      backward.execute(rows.backward(f.scores), workspace.get(), backward.workspace_bytes());
      Found x{{}, static_cast<int64_t>(forward.workspace_bytes())};
      for (const Owned* t : {&rows.o, &rows.lse, &rows.dq, &rows.dk, &rows.dv}) x.all.insert(x.all.end(), t->memory.begin(), t->memory.end());
      return x;
    };
    const int64_t head = 100 * held.rows_q;
    const Found usual = found(false, head, 100), one_head = found(true, head, 100);
    EXPECT_NE(usual.all, one_head.all);
    constexpr int64_t kFew = 15 * 2 * 112 + 50 * 2 * 12 + 256;  // rows before the first, of both heads, gaps of 12 bytes at the end of rows
    for (const auto& [of_head, of_row] : {std::pair<int64_t, int64_t>{100, 200}, {100, 4000}, {4000, 9000}, {117, 237}, {100 * head, 6400}}) {
      const Found x = found(false, of_head, of_row);
      EXPECT_EQ(x.all, usual.all) << of_head << " " << of_row;
      EXPECT_LE(x.bytes, usual.bytes + kFew) << of_head << " " << of_row;
    }
    for (const int64_t of_row : {100, 6400}) {
      const Found x = found(true, 0, of_row);
      EXPECT_EQ(x.all, one_head.all) << of_row;
      EXPECT_LE(x.bytes, one_head.bytes + 256 + 65 * 12) << of_row;
    }
  });
}

// Of a call that threw in the middle nothing is left in the way of the next.
TEST(RingPlanSmall, AfterACallThatThrew) {
  RingSequence sequence;
  sequence.seqlen_q = sequence.seqlen_k = 24;
  const Owned q = normal(DType::kF32, {1, 24, 2, 16}, 5), k = normal(DType::kF32, {1, 24, 1, 16}, 6), v = normal(DType::kF32, {1, 24, 1, 16}, 7),
              one(DType::kF32, {1, 24, 2, 16});
  forward({q.view(), k.view(), v.view(), one.view(), {}, {}}, {});
  std::mutex mutex;
  Owned together(DType::kF32, one.shape);
  run_ranks(2, false, [&](RingTransport& transport) {
    const RingSchedule held = ring_schedule(sequence, transport.rank(), 2);
    const Owned q_ = q.rows(1, held.held_q), k_ = k.rows(1, held.held_k), v_ = v.rows(1, held.held_k), o(DType::kF32, q_.shape);
    const ForwardTensors f{q_.view(), k_.view(), v_.view(), o.view(), {}, {}};
    RingPlan plan(transport, sequence, f, {});
    Workspace workspace(plan.workspace_bytes());
    ForwardTensors bad = f;
    bad.o = Tensor(nullptr, DType::kF32, {1, held.rows_q, 2, 16});  // found when the keys are on their way
    EXPECT_THROW(plan.execute(bad, workspace.get(), plan.workspace_bytes()), Error);
    plan.execute(f, workspace.get(), plan.workspace_bytes());
    const std::lock_guard lock(mutex);
    together.put_rows(1, held.held_q, o);
  });
  for (int64_t i = 0; i < one.size(); ++i) ASSERT_LT(std::fabs(together.get(i) - one.get(i)), 1e-5) << i;
}

}  // namespace
}  // namespace fattn::testing
