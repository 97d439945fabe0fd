// Which keys which queries see, in positions: the packed sequences and the limits of causal mask and window.
#pragma once

#include <cstdint>
#include <vector>

#include "fattn/fattn.h"

namespace fattn::core::ring {

// Of all queries and all keys. Query i sees the keys j of its sequence with -left <= j - (i + shift) <= right.
struct Sequence {
  int64_t q_begin, q_end, k_begin, k_end;
  int64_t shift() const { return k_end - q_end; }
};

// Queries [q_begin, q_end) and keys [k_begin, k_end) of one sequence.
struct Rectangle {
  int64_t q_begin, q_end, k_begin, k_end;
  int32_t sequence;
  bool empty() const { return q_begin >= q_end || k_begin >= k_end; }
};

class Sequences {
 public:
  // Checks every number of the problem that is about them.
  explicit Sequences(const fattn_ring_problem& problem);

  const Sequence& operator[](int32_t i) const { return all_[static_cast<size_t>(i)]; }
  int64_t left() const { return left_; }
  int64_t right() const { return right_; }

  // What queries of the one range see of the other: a rectangle a sequence, in their order, each the smallest one.
  std::vector<Rectangle> seen(const fattn_ring_range& queries, const fattn_ring_range& keys) const;

  // Without the outer queries that see none of these keys, and keys that none of these queries sees.
  Rectangle trimmed(Rectangle x) const;

 private:
  std::vector<Sequence> all_;
  int64_t left_, right_;  // at least all positions: no limit
};

}  // namespace fattn::core::ring
