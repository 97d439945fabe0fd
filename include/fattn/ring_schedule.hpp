// Who holds which rows of a sequence that several processes share, what travels in each hop, and what each computes: fattn_ring_create as C++ has it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fattn/error.hpp"
#include "fattn/fattn.h"

namespace fattn {

enum class RingLayout : int32_t {
  kContiguous = FATTN_RING_CONTIGUOUS,  // rank r has the r-th of n parts: windows, or no mask
  kZigzag = FATTN_RING_ZIGZAG,  // of 2 n parts the r-th and the r-th from the end: causal masks, under which all ranks have the same work then
};

// The rows of all ranks together.
struct RingSequence {
  int64_t seqlen_q = 0, seqlen_k = 0;  // of packed sequences all rows behind each other
  RingLayout layout = RingLayout::kZigzag;
  // (sequences + 1) each: where packed sequences begin. Empty: there are none.
  std::vector<int64_t> cu_seqlens_q, cu_seqlens_k;
  // Ranks compare shapes and options when a plan is made: one small exchange. Else a mismatch hangs, or gives wrong numbers.
  bool agree = true;
};

// A call of attention: fattn_ring_block.
struct RingBlock : fattn_ring_block {
  bool merges;  // an earlier block has results of these queries
  bool adds;    // an earlier block of the hop has gradients of these keys
};

// fattn_ring_hop, with its lists.
struct RingHop {
  int send_to, receive_from;
  std::vector<fattn_ring_range> sent;      // rows of this rank's keys
  std::vector<fattn_ring_range> received;  // positions, in the order in which they come
  int64_t rows_sent, rows_received;
  std::vector<RingBlock> blocks;
};

struct RingSchedule {
  int64_t rows_q = 0, rows_k = 0;                // that the rank holds
  std::vector<fattn_ring_range> held_q, held_k;  // their positions, in the order of the rows
  std::vector<RingHop> hops;
};

// What blocks must be for what else scores depend on: fattn_ring_problem's has_alibi and keep_positions.
struct RingBlocks {
  bool alibi = false;
  bool positions = false;  // for a bias, a mask or dropout, which know the positions of rows
};

// That of one rank. Windows are as in Options. Throws Error.
inline RingSchedule ring_schedule(const RingSequence& sequence, int rank, int ranks, bool causal = false, int64_t window_left = -1,
                                  int64_t window_right = -1, RingBlocks made_for = {}) {
  fattn_ring_problem p{};
  p.struct_size = sizeof p;
  p.layout = static_cast<int32_t>(sequence.layout);
  p.nranks = ranks;
  p.rank = rank;
  p.causal = causal ? 1 : 0;
  p.has_alibi = made_for.alibi ? 1 : 0;
  p.keep_positions = made_for.positions ? 1 : 0;
  p.has_window = window_left != -1 || window_right != -1 ? 1 : 0;
  p.window_left = window_left;
  p.window_right = window_right;
  p.seqlen_q = sequence.seqlen_q;
  p.seqlen_k = sequence.seqlen_k;
  if (sequence.cu_seqlens_q.size() != sequence.cu_seqlens_k.size())
    throw Error(ErrorCode::kInvalidArgument, "cu_seqlens_q has " + std::to_string(sequence.cu_seqlens_q.size()) + " numbers and cu_seqlens_k " +
                                                 std::to_string(sequence.cu_seqlens_k.size()) + "; give both, of the same length, or neither");
  if (!sequence.cu_seqlens_q.empty()) {
    p.nsequences = static_cast<int32_t>(sequence.cu_seqlens_q.size()) - 1;
    p.cu_seqlens_q = sequence.cu_seqlens_q.data();
    p.cu_seqlens_k = sequence.cu_seqlens_k.data();
  }
  struct Destroy {
    void operator()(fattn_ring* ring) const { fattn_ring_destroy(ring); }
  };
  fattn_ring* raw = nullptr;
  check(fattn_ring_create(&p, &raw));
  const std::unique_ptr<fattn_ring, Destroy> owner(raw);
  fattn_ring_schedule found{};
  found.struct_size = sizeof found;
  check(fattn_ring_query(raw, &found));

  RingSchedule schedule;
  schedule.rows_q = found.rows_q;
  schedule.rows_k = found.rows_k;
  schedule.held_q.assign(found.held_q, found.held_q + found.nheld_q);
  schedule.held_k.assign(found.held_k, found.held_k + found.nheld_k);
  // Whether some of these rows were marked before; marks them.
  const auto mark = [](std::vector<char>& marks, int64_t first, int64_t count) {
    const auto begin = marks.begin() + first, end = begin + count;
    const bool marked = std::find(begin, end, 1) != end;
    std::fill(begin, end, char{1});
    return marked;
  };
  const fattn_ring_range *sent = found.sent, *received = found.received;
  const fattn_ring_block* block = found.blocks;
  std::vector<char> queries(static_cast<size_t>(found.rows_q));
  for (int32_t h = 0; h < found.nhops; ++h) {
    const fattn_ring_hop& from = found.hops[h];
    RingHop hop{
        from.send_to, from.receive_from, {sent, sent + from.nsent}, {received, received + from.nreceived}, from.rows_sent, from.rows_received, {}};
    sent += from.nsent;
    received += from.nreceived;
    std::vector<char> keys(static_cast<size_t>(h == 0 ? found.rows_k : from.rows_received));
    for (int64_t i = 0; i < from.nblocks; ++i, ++block)
      hop.blocks.push_back({*block, mark(queries, block->q_row, block->q_rows), mark(keys, block->k_row, block->k_rows)});
    schedule.hops.push_back(std::move(hop));
  }
  return schedule;
}

}  // namespace fattn
