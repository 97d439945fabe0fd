#include "lab/crossing.h"

#include <algorithm>
#include <cmath>

namespace fattn::lab {

int Duel::verdict() const {
  if (!a && !b) return 0;
  if (!a) return 1;
  if (!b) return -1;
  if (measure::undecided(*a, *b)) return 0;
  return a->median < b->median ? -1 : 1;
}

Crossing find_crossing(int64_t from, int64_t to, double closer, const std::function<Duel(int64_t seqlen)>& measure) {
  Crossing crossing;
  std::vector<Duel>& duels = crossing.duels;
  const auto at = [&](int64_t seqlen) {
    duels.push_back(measure(seqlen));
    return duels.back().verdict();
  };
  int64_t low = from, high = to;
  const int first = at(low), last = at(high);
  if (first == 1 && last == 1) {
    crossing.always = true;
    crossing.faster_from = low;
  } else if (last != 1) {
    crossing.never = true;
    crossing.slower_until = high;
  } else {
    // Between the last length where b is not faster and the first where it is.
    while (static_cast<double>(high) > closer * static_cast<double>(low) && high - low > 1) {
      const auto middle = static_cast<int64_t>(std::llround(std::sqrt(static_cast<double>(low) * static_cast<double>(high))));
      if (middle <= low || middle >= high) break;
      (at(middle) == 1 ? high : low) = middle;
    }
    crossing.slower_until = low;
    crossing.faster_from = high;
  }
  std::sort(duels.begin(), duels.end(), [](const Duel& x, const Duel& y) { return x.seqlen < y.seqlen; });
  return crossing;
}

}  // namespace fattn::lab
