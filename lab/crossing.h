// From which sequence length on one algorithm is faster than another, found by measuring: bisection, undecided where intervals overlap.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "measure/problem.h"
#include "measure/statistics.h"

namespace fattn::lab {

// Both contestants at one length.
struct Duel {
  int64_t seqlen = 0;
  std::optional<measure::Statistics> a, b;
  std::string reason;  // why one of them was not timed
  // -1: a is faster, 1: b is, 0: undecided.
  int verdict() const;
};

struct Crossing {
  std::vector<Duel> duels;  // by length
  // The lengths between which it lies: up to `slower_until` a is faster or it is undecided, from `faster_from` on b is. 0: there is none of them.
  int64_t slower_until = 0, faster_from = 0;
  bool never = false, always = false;  // b is at no length, at all lengths that were measured
};

// Measures at `from` and `to` and then between them until neighbouring lengths are a factor of `closer` apart. `measure`: a duel at a length.
Crossing find_crossing(int64_t from, int64_t to, double closer, const std::function<Duel(int64_t seqlen)>& measure);

}  // namespace fattn::lab
