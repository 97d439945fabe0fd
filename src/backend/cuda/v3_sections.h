// How many heads the tiles of v3's forward pass run side by side under an uneven mask, where tiles are of several lengths and a grid as large as the
// GPU takes them in turns (kernels/v3/schedule.h).
#pragma once

#include <cstdint>

#include "device_abi/mask.h"

namespace fattn::core::cuda {

struct V3Turns {
  Mask mask;
  int64_t heads;              // of all batch entries
  int block_m, block_n;       // of a tile: its queries, and the keys of a step
  int ctas;                   // that take tiles in turns
  int64_t most_in_a_section;  // heads whose keys and values the L2 holds
  double preferred;           // heads of a section, where the balance of several sizes is alike
};

// The part of the time that the CTAs compute, if `heads_per_section` heads' tiles run side by side; 1 if all end together. In steps of tiles, plus
// one a tile for what is not its steps.
double v3_balance(const V3Turns& turns, int64_t heads_per_section);

// The same where each CTA computes `tiles_per_cta` tiles that follow one another, and whichever is free takes the next.
double v3_free_balance(const V3Turns& turns, int64_t heads_per_section, int tiles_per_cta);

// The heads of a section, in turns: the best balance, and of those that have it the nearest to `preferred`.
int64_t v3_heads_per_section(const V3Turns& turns);

// Where whichever is free takes the next: the best balance, of up to twice as many heads as the L2 holds, if that gains something.
int64_t v3_free_heads_per_section(const V3Turns& turns, int tiles_per_cta);

}  // namespace fattn::core::cuda
