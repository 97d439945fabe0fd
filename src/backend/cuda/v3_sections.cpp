#include "backend/cuda/v3_sections.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>
#include <vector>

#include "backend/cuda/limits.h"

namespace fattn::core::cuda {
namespace {

// Steps of each tile of a head, in the order in which they are taken: that of the last queries first.
std::vector<int> steps_of(const V3Turns& turns) {
  const int64_t tiles = ceil_div(turns.mask.seqlen_q, turns.block_m);
  std::vector<int> steps(static_cast<size_t>(tiles));
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t last = std::min<int64_t>(turns.mask.seqlen_q, (tiles - i) * turns.block_m) - 1;
    const int64_t first = (tiles - 1 - i) * turns.block_m, begin = turns.mask.visible_begin(first) / turns.block_n;
    steps[static_cast<size_t>(i)] = static_cast<int>(1 + std::max<int64_t>(1, ceil_div(turns.mask.visible_end(last), turns.block_n) - begin));
  }
  return steps;
}

double balance(const V3Turns& turns, const std::vector<int>& steps, int64_t heads_per_section) {
  std::vector<int64_t> taken(static_cast<size_t>(turns.ctas));
  int64_t sum = 0, cta = 0;
  bool back = false;  // turns go to and fro
  for (int64_t first = 0; first < turns.heads; first += heads_per_section) {
    const int64_t heads = std::min(heads_per_section, turns.heads - first);
    for (const int tile : steps) {
      for (int64_t head = 0; head < heads; ++head) {
        taken[static_cast<size_t>(back ? turns.ctas - 1 - cta : cta)] += tile;
        if (++cta == turns.ctas) cta = 0, back = !back;
      }
      sum += heads * tile;
    }
  }
  const int64_t longest = *std::max_element(taken.begin(), taken.end());
  return static_cast<double>(sum) / (static_cast<double>(longest) * turns.ctas);
}

double free_balance(const V3Turns& turns, const std::vector<int>& steps, int64_t heads_per_section, int tiles_per_cta) {
  std::priority_queue<int64_t, std::vector<int64_t>, std::greater<>> busy_until;
  for (int i = 0; i < turns.ctas; ++i) busy_until.push(0);
  int64_t sum = 0, longest = 0, tiles = 0, together = 0;
  const auto give = [&] {
    const int64_t end = busy_until.top() + together;
    busy_until.pop();
    busy_until.push(end);
    longest = std::max(longest, end);
    sum += together;
    tiles = together = 0;
  };
  for (int64_t first = 0; first < turns.heads; first += heads_per_section)
    for (const int tile : steps)
      for (int64_t head = first; head < std::min(turns.heads, first + heads_per_section); ++head) {
        together += tile;
        if (++tiles == tiles_per_cta) give();
      }
  if (tiles > 0) give();
  return static_cast<double>(sum) / (static_cast<double>(longest) * turns.ctas);
}

// Beyond that many turns of all CTAs every size is balanced, and a search would take longer than it is worth.
bool many_turns(const V3Turns& turns, const std::vector<int>& steps) { return static_cast<int64_t>(steps.size()) * turns.heads > 48 * turns.ctas; }

// Sizes worth a look: whole parts of the grid, equal parts of the heads, and the most that may be.
std::vector<int64_t> candidates(const V3Turns& turns) {
  const int64_t most = std::min({turns.heads, turns.most_in_a_section, int64_t{turns.ctas}});
  std::vector<int64_t> all{std::max<int64_t>(1, most)};
  for (int64_t parts = 1; parts <= turns.ctas; ++parts)
    if (turns.ctas % parts == 0 && turns.ctas / parts < most) all.push_back(turns.ctas / parts);
  for (int64_t parts = 1; parts <= 4; ++parts)
    if (const int64_t heads = ceil_div(turns.heads, parts); heads < most) all.push_back(heads);
  return all;
}

}  // namespace

double v3_balance(const V3Turns& turns, int64_t heads_per_section) { return balance(turns, steps_of(turns), heads_per_section); }

double v3_free_balance(const V3Turns& turns, int64_t heads_per_section, int tiles_per_cta) {
  return free_balance(turns, steps_of(turns), heads_per_section, tiles_per_cta);
}

int64_t v3_heads_per_section(const V3Turns& turns) {
  const std::vector<int> steps = steps_of(turns);
  const bool many = many_turns(turns, steps);
  constexpr double kAlike = 0.004;
  int64_t best = 0;
  double best_balance = 0;
  for (const int64_t heads : candidates(turns)) {
    const double now = many ? 1 : balance(turns, steps, heads);
    const auto distance = [&](int64_t x) { return std::abs(std::log(static_cast<double>(x) / turns.preferred)); };
    if (best == 0 || now > best_balance + kAlike || (now > best_balance - kAlike && distance(heads) < distance(best))) {
      best = heads;
      best_balance = std::max(best_balance, now);
    }
  }
  return best;
}

int64_t v3_free_heads_per_section(const V3Turns& turns, int tiles_per_cta) {
  const std::vector<int> steps = steps_of(turns);
  int64_t best = ceil_div(turns.heads, ceil_div(turns.heads, turns.most_in_a_section));  // equal sections
  if (many_turns(turns, steps)) return best;
  constexpr double kGain = 0.02;  // what a size other than that has to gain
  double best_balance = free_balance(turns, steps, best, tiles_per_cta) + kGain;
  for (int64_t heads = 1; heads <= std::min(turns.heads, 2 * turns.most_in_a_section); ++heads)
    if (const double now = free_balance(turns, steps, heads, tiles_per_cta); now > best_balance) {
      best = heads;
      best_balance = now;
    }
  return best;
}

}  // namespace fattn::core::cuda
