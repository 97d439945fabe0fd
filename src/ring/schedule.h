// The schedule of ring attention: which rows each rank holds, what travels in each hop, which blocks it computes. Knows no tensors.
#pragma once

#include <vector>

#include "fattn/fattn.h"

namespace fattn::core::ring {

using Range = fattn_ring_range;
using Hop = fattn_ring_hop;
using Block = fattn_ring_block;

struct Schedule {
  std::vector<Range> held_q, held_k, sent, received;
  std::vector<Hop> hops;
  std::vector<Block> blocks;
};

// Throws Error where the problem makes no sense.
Schedule make_schedule(const fattn_ring_problem& problem);

}  // namespace fattn::core::ring
