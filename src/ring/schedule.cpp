// Who holds what, what travels, which blocks are computed.
#include "ring/schedule.h"

#include <algorithm>

#include "fattn/error.hpp"
#include "ring/sequences.h"
#include "shared/text.h"

namespace fattn::core::ring {
namespace {

constexpr int32_t kMostRanks = 1 << 16;

void check_ranks(const fattn_ring_problem& p) {
  if (p.layout != FATTN_RING_CONTIGUOUS && p.layout != FATTN_RING_ZIGZAG)
    throw Error(ErrorCode::kInvalidArgument, text("layout is ", p.layout, "; allowed: 0 (contiguous), 1 (zigzag)"));
  if (p.nranks < 1 || p.nranks > kMostRanks) throw Error(ErrorCode::kInvalidArgument, text("nranks is ", p.nranks, "; allowed: 1 to ", kMostRanks));
  if (p.rank < 0 || p.rank >= p.nranks)
    throw Error(ErrorCode::kInvalidArgument, text("rank is ", p.rank, "; allowed: 0 to nranks - 1, ", p.nranks - 1));
}

// In ascending order of `first`; those that touch become one.
std::vector<Range> joined(std::vector<Range> ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.first < b.first; });
  std::vector<Range> all;
  for (const Range& x : ranges) {
    if (x.count == 0) continue;
    if (all.empty() || x.first > all.back().first + all.back().count)
      all.push_back(x);
    else
      all.back().count = std::max(all.back().count, x.first + x.count - all.back().first);
  }
  return all;
}

// The first of the positions of part i of n; length * i fits, because both have limits.
int64_t part_begin(int64_t length, int64_t i, int64_t n) { return length / n * i + length % n * i / n; }

std::vector<Range> held(const fattn_ring_problem& p, int32_t rank, int64_t length) {
  const int64_t n = p.layout == FATTN_RING_ZIGZAG ? 2 * int64_t{p.nranks} : p.nranks;
  const auto part = [&](int64_t i) { return Range{part_begin(length, i, n), part_begin(length, i + 1, n) - part_begin(length, i, n)}; };
  if (p.layout == FATTN_RING_ZIGZAG) return joined({part(rank), part(n - 1 - rank)});
  return joined({part(rank)});
}

int64_t rows_of(const std::vector<Range>& ranges) {
  int64_t rows = 0;
  for (const Range& x : ranges) rows += x.count;
  return rows;
}

// Where a position is among the rows of `ranges`, one of which has it.
int64_t row_of(const std::vector<Range>& ranges, int64_t position) {
  int64_t row = 0;
  for (const Range& x : ranges) {
    if (position >= x.first && position < x.first + x.count) return row + position - x.first;
    row += x.count;
  }
  throw Error(ErrorCode::kInternal, text("position ", position, " is not held"));
}

std::vector<Rectangle> seen(const Sequences& sequences, const std::vector<Range>& queries, const std::vector<Range>& keys) {
  std::vector<Rectangle> all;
  for (const Range& q : queries)
    for (const Range& k : keys)
      for (const Rectangle& x : sequences.seen(q, k)) all.push_back(x);
  return all;
}

std::vector<Range> keys_of(const std::vector<Rectangle>& rectangles) {
  std::vector<Range> keys;
  for (const Rectangle& x : rectangles) keys.push_back({x.k_begin, x.k_end - x.k_begin});
  return joined(std::move(keys));
}

// Cut where a query's own position is a key's: a square on that diagonal is aligned as a call of attention is, all else is on one side of it.
std::vector<Rectangle> split_at_diagonal(const Sequences& sequences, const Rectangle& x) {
  const int64_t shift = sequences[x.sequence].shift();
  const int64_t begin = std::max(x.q_begin + shift, x.k_begin), end = std::min(x.q_end + shift, x.k_end);
  if (begin >= end) return {x};
  std::vector<Rectangle> all;
  const int64_t rows[] = {x.q_begin, begin - shift, end - shift, x.q_end}, keys[] = {x.k_begin, begin, end, x.k_end};
  for (int i = 0; i < 3; ++i)
    for (int j = 0; j < 3; ++j) {
      const Rectangle part = sequences.trimmed({rows[i], rows[i + 1], keys[j], keys[j + 1], x.sequence});
      if (!part.empty()) all.push_back(part);
    }
  return all;
}

// `k_row`: of the rectangle's first key.
Block block_of(const Sequences& sequences, const Rectangle& x, int64_t q_row, int64_t k_row, bool alibi) {
  Block b{};
  b.q_row = q_row;
  b.q_rows = x.q_end - x.q_begin;
  b.k_row = k_row;
  b.k_rows = x.k_end - x.k_begin;
  b.q_position = x.q_begin;
  b.k_position = x.k_begin;
  b.sequence = x.sequence;
  b.distance = x.q_begin + sequences[x.sequence].shift() - x.k_begin;
  // What the alignment of the block alone takes from the distance of its first query and key.
  const int64_t further = b.distance - (b.k_rows - b.q_rows);
  b.window_left = sequences.left() - further;
  b.window_right = sequences.right() + further;
  if (b.window_left >= b.k_rows - 1) b.window_left = -1;
  if (b.window_right >= b.q_rows - 1) b.window_right = -1;
  if (alibi && further != 0) b.side = b.distance + b.q_rows - 1 <= 0 ? -1 : 1;
  return b;
}

bool unlimited(const Block& b) { return b.window_left < 0 && b.window_right < 0; }
bool causal_square(const Block& b) { return b.window_left < 0 && b.window_right == 0 && b.q_rows == b.k_rows; }

// Blocks that make one rectangle of rows become one call: in a zigzag nearly every hop has one then.
void append_joined(std::vector<Block>& blocks, size_t first, const Block& next) {
  const auto last = [&](size_t i) -> Block& { return blocks[blocks.size() - i]; };
  const size_t count = blocks.size() - first;
  if (count >= 2 && causal_square(last(2)) && unlimited(last(1)) && causal_square(next) && last(1).k_row == last(2).k_row &&
      last(1).k_rows == last(2).k_rows && last(1).q_row == last(2).q_row + last(2).q_rows && last(1).q_row == next.q_row &&
      last(1).q_rows == next.q_rows && next.k_row == last(2).k_row + last(2).k_rows) {
    last(2).q_rows += next.q_rows;
    last(2).k_rows += next.k_rows;
    blocks.pop_back();
    return;
  }
  if (count >= 1 && unlimited(last(1)) && unlimited(next)) {
    if (last(1).k_row == next.k_row && last(1).k_rows == next.k_rows && last(1).q_row + last(1).q_rows == next.q_row) {
      last(1).q_rows += next.q_rows;
      return;
    }
    if (last(1).q_row == next.q_row && last(1).q_rows == next.q_rows && last(1).k_row + last(1).k_rows == next.k_row) {
      last(1).k_rows += next.k_rows;
      return;
    }
  }
  blocks.push_back(next);
}

// `keys`: the positions that lie behind each other where the blocks find them.
int64_t append_blocks(const fattn_ring_problem& p, const Sequences& sequences, const std::vector<Rectangle>& rectangles,
                      const std::vector<Range>& keys, Schedule& to) {
  const size_t first = to.blocks.size();
  for (const Rectangle& whole : rectangles)
    for (const Rectangle& x : p.has_alibi ? split_at_diagonal(sequences, whole) : std::vector<Rectangle>{whole}) {
      const Block block = block_of(sequences, x, row_of(to.held_q, x.q_begin), row_of(keys, x.k_begin), p.has_alibi != 0);
      if (p.keep_positions || p.has_alibi)
        to.blocks.push_back(block);
      else
        append_joined(to.blocks, first, block);
    }
  return static_cast<int64_t>(to.blocks.size() - first);
}

void append_hop(const fattn_ring_problem& p, const Sequences& sequences, int32_t distance, Schedule& to) {
  Hop hop{};
  hop.send_to = (p.rank + distance) % p.nranks;
  hop.receive_from = (p.rank - distance + p.nranks) % p.nranks;
  const std::vector<Range> theirs = distance == 0 ? to.held_k : held(p, hop.receive_from, p.seqlen_k);
  const std::vector<Rectangle> rectangles = seen(sequences, to.held_q, theirs);
  if (distance > 0) {
    const std::vector<Range> received = keys_of(rectangles), sent = keys_of(seen(sequences, held(p, hop.send_to, p.seqlen_q), to.held_k));
    for (const Range& x : sent) to.sent.push_back({row_of(to.held_k, x.first), x.count});
    to.received.insert(to.received.end(), received.begin(), received.end());
    hop.nsent = static_cast<int64_t>(sent.size());
    hop.nreceived = static_cast<int64_t>(received.size());
    hop.rows_sent = rows_of(sent);
    hop.rows_received = rows_of(received);
    if (!p.gathered) hop.nblocks = append_blocks(p, sequences, rectangles, received, to);
  } else if (!p.gathered) {
    hop.nblocks = append_blocks(p, sequences, rectangles, to.held_k, to);
  }
  if (p.gathered && distance == p.nranks - 1) {
    const std::vector<Range> all = joined({{0, p.seqlen_k}});
    hop.nblocks = append_blocks(p, sequences, seen(sequences, to.held_q, all), all, to);
  }
  to.hops.push_back(hop);
}

}  // namespace

Schedule make_schedule(const fattn_ring_problem& p) {
  check_ranks(p);
  const Sequences sequences(p);
  Schedule schedule;
  schedule.held_q = held(p, p.rank, p.seqlen_q);
  schedule.held_k = held(p, p.rank, p.seqlen_k);
  for (int32_t distance = 0; distance < p.nranks; ++distance) append_hop(p, sequences, distance, schedule);
  return schedule;
}

}  // namespace fattn::core::ring
