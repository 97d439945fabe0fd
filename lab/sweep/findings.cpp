// What a sweep found, in sentences. "Faster" is said where the intervals of the medians do not overlap, and of measured values alone.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "lab/sweep/sweep.h"

namespace fattn::lab {
namespace {

std::string at(const Sweep& sweep, int64_t value) {
  return sweep.axis == SweepAxis::kCausal ? (value == 1 ? "with the causal mask" : "without a mask")
                                          : fmt::format("at {} {}", name_of(sweep.axis), value);
}

std::string times(double ratio) { return fmt::format("{:.{}f}x", ratio, ratio < 9.95 ? 2 : 1); }

// Cells of a contestant that can be held against the baseline, by value.
std::vector<const Cell*> compared(const Sweep& sweep, const std::string& contestant, const std::string& pass) {
  std::vector<const Cell*> cells;
  for (const int64_t value : sweep.values)
    if (const Cell* cell = sweep.cell(value, contestant, pass); cell && cell->ok() && cell->speedup) cells.push_back(cell);
  if (sweep.axis != SweepAxis::kCausal) std::sort(cells.begin(), cells.end(), [](const Cell* a, const Cell* b) { return a->value < b->value; });
  return cells;
}

bool wins(const Cell* cell) { return !cell->undecided && *cell->speedup > 1; }
bool loses(const Cell* cell) { return !cell->undecided && *cell->speedup < 1; }

std::string extremes(const Sweep& sweep, const std::vector<const Cell*>& cells) {
  const auto [least, most] = std::minmax_element(cells.begin(), cells.end(), [](const Cell* a, const Cell* b) { return *a->speedup < *b->speedup; });
  if (cells.size() == 1) return fmt::format("{} {}", times(*(*least)->speedup), at(sweep, (*least)->value));
  return fmt::format("{} {} to {} {}", times(*(*least)->speedup), at(sweep, (*least)->value), times(*(*most)->speedup), at(sweep, (*most)->value));
}

std::string speed(const Sweep& sweep, const std::string& contestant, const std::string& pass) {
  const std::vector<const Cell*> cells = compared(sweep, contestant, pass);
  const std::string head = fmt::format("{}, {}: ", words_for_pass(pass), contestant);
  if (cells.empty()) return head + fmt::format("nowhere measured together with {}, so no speed-up is known.", sweep.baseline);
  const std::string name = name_of(sweep.axis);
  if (std::all_of(cells.begin(), cells.end(), wins))
    return head + (cells.size() == 1 ? "faster than " : "faster than ") + sweep.baseline +
           (sweep.axis == SweepAxis::kCausal || cells.size() == 1 ? "" : fmt::format(" at every {} that both were measured at", name)) + ", " +
           extremes(sweep, cells) + ".";
  if (std::none_of(cells.begin(), cells.end(), wins))
    return head +
           (std::all_of(cells.begin(), cells.end(), loses)   ? "slower than " + sweep.baseline + ", "
            : std::any_of(cells.begin(), cells.end(), loses) ? "nowhere faster than " + sweep.baseline + " for certain, "
                                                             : "as fast as " + sweep.baseline + ", within what was measured, ") +
           extremes(sweep, cells) + ".";
  // From where on it stays faster, to the largest that was compared.
  size_t from = cells.size();
  while (from > 0 && wins(cells[from - 1])) --from;
  if (from == cells.size() || sweep.axis == SweepAxis::kCausal) {
    const auto count = [&](auto&& of) { return std::count_if(cells.begin(), cells.end(), of); };
    const auto won = count(wins), lost = count(loses);
    return head +
           fmt::format("faster than {} at {} of {}{}, undecided at {}: ", sweep.baseline, won, cells.size(),
                       lost > 0 ? fmt::format(", slower at {}", lost) : "", static_cast<int64_t>(cells.size()) - won - lost) +
           extremes(sweep, cells) + ".";
  }
  const std::vector<const Cell*> above(cells.begin() + static_cast<std::ptrdiff_t>(from), cells.end());
  const Cell* below = cells[from - 1];
  const std::string where = above.size() > 1
                                ? fmt::format("from {} {} on ({})", name, above.front()->value, extremes(sweep, above))
                                : fmt::format("{}, the largest compared ({})", at(sweep, above.front()->value), times(*above.front()->speedup));
  return head + fmt::format("faster than {} {}; {} {} ({}).", sweep.baseline, where, loses(below) ? "slower" : "undecided", at(sweep, below->value),
                            times(*below->speedup));
}

// Where a contestant could not run for this reason, and who still could.
std::string ran_out(const Sweep& sweep, const std::string& contestant, const std::string& status, const std::string& what) {
  std::vector<int64_t> values;
  for (const int64_t value : sweep.values)
    for (const std::string& pass : sweep.passes)
      if (const Cell* cell = sweep.cell(value, contestant, pass); cell && cell->status == status && (values.empty() || values.back() != value))
        values.push_back(value);
  if (values.empty()) return "";
  if (status == "unsupported" || status == "unavailable")
    if (std::none_of(sweep.cells.begin(), sweep.cells.end(), [&](const Cell& cell) { return cell.contestant == contestant && cell.ok(); }))
      return fmt::format("{} was not measured: {}.", contestant, sweep.cell(values.front(), contestant, sweep.passes.front())->reason);
  std::string text = contestant + " " + what + " ";
  if (sweep.axis == SweepAxis::kCausal) {
    for (size_t i = 0; i < values.size(); ++i) text += (i > 0 ? " and " : "") + at(sweep, values[i]);
  } else {
    std::vector<int64_t> sorted = sweep.values;
    std::sort(sorted.begin(), sorted.end());
    std::sort(values.begin(), values.end());
    const bool to_the_end = std::equal(values.rbegin(), values.rend(), sorted.rbegin()) && values.size() > 1;
    text += to_the_end ? fmt::format("from {} {} on", name_of(sweep.axis), values.front()) : at(sweep, values.front());
    for (size_t i = 1; i < values.size() && !to_the_end; ++i) text += fmt::format(", {}", values[i]);
  }
  if (status != "out_of_memory") return text + ".";
  std::vector<std::string> others;
  for (const std::string& other : sweep.contestants)
    if (const Cell* cell = sweep.cell(values.back(), other, sweep.passes.front()); other != contestant && cell && cell->ok()) others.push_back(other);
  if (!others.empty())
    text += fmt::format("; {} still run{} {}", fmt::join(others, " and "), others.size() == 1 ? "s" : "", at(sweep, values.back()));
  return text + ".";
}

std::string memory(const Sweep& sweep, const std::string& contestant, const std::string& pass) {
  const Cell* largest = nullptr;
  for (const Cell* cell : compared(sweep, contestant, pass))
    if (cell->memory_share && (!largest || cell->value > largest->value)) largest = cell;
  if (!largest || !largest->extra_bytes) return "";
  return fmt::format(" It adds {:.{}f} % of {}'s memory {}.", 100 * *largest->memory_share, *largest->memory_share < 0.0995 ? 1 : 0, sweep.baseline,
                     at(sweep, largest->value));
}

std::string growth(const Growth& one) {
  constexpr double kToldWell = 1;  // of an interval's width: beyond it neither seqlen nor seqlen^2 is ruled out
  const std::string head = fmt::format("{}, {}: ", words_for_pass(one.pass), one.contestant);
  if (!one.law) return head + "how its time grows with seqlen is not known: " + one.reason + ".";
  const std::string numbers =
      fmt::format("seqlen^{:.2f}, 95 % interval {:.2f} to {:.2f}, from {} lengths", one.law->exponent, one.law->low, one.law->high, one.law->points);
  if (!(one.law->high - one.law->low <= kToldWell)) return head + "how its time grows is not told well by what was measured (" + numbers + ").";
  return head + "time grows as " + numbers + ".";
}

}  // namespace

std::vector<std::string> findings(const Sweep& sweep) {
  std::vector<std::string> all;
  const auto add = [&](std::string sentence) {
    if (sentence.empty()) return;
    // A sentence begins with a capital letter, a name of a contestant does not.
    if (sentence.rfind("forward", 0) == 0 || sentence.rfind("backward", 0) == 0) sentence[0] = static_cast<char>(sentence[0] - 'a' + 'A');
    all.push_back(std::move(sentence));
  };
  if (!sweep.complete) add("The sweep is not complete; this is of what was measured.");
  for (const std::string& pass : sweep.passes)
    for (const std::string& contestant : sweep.contestants)
      if (!sweep.baseline.empty() && contestant != sweep.baseline) {
        const bool tried =
            std::any_of(sweep.cells.begin(), sweep.cells.end(), [&](const Cell& cell) { return cell.contestant == contestant && cell.ok(); });
        if (tried) add(speed(sweep, contestant, pass) + memory(sweep, contestant, pass));
      }
  for (const std::string& contestant : sweep.contestants) {
    add(ran_out(sweep, contestant, "out_of_memory", "does not fit into memory"));
    add(ran_out(sweep, contestant, "timeout", "was left out for its time"));
    add(ran_out(sweep, contestant, "unsupported", "cannot compute the problem"));
    add(ran_out(sweep, contestant, "unavailable", "is not here; asked for"));
    add(ran_out(sweep, contestant, "check_failed", "gives a result beyond its error bound, so nothing is said of its speed,"));
    add(ran_out(sweep, contestant, "refused", "was refused, as its times cannot be true,"));
    add(ran_out(sweep, contestant, "failed", "failed"));
  }
  for (const Growth& one : growth_of(sweep)) {
    const bool tried =
        std::any_of(sweep.cells.begin(), sweep.cells.end(), [&](const Cell& cell) { return cell.contestant == one.contestant && cell.ok(); });
    if (tried) add(growth(one));
  }
  return all;
}

}  // namespace fattn::lab
