// What tables hold, and the units that all commands print.
#include "cli/table.h"

#include <fmt/format.h>

#include <algorithm>

#include "measure/memory.h"

namespace fattn::cli {

void Table::add(std::vector<Cell> cells) {
  cells.resize(columns_.size());
  rows_.push_back({std::move(cells), {}});
}

void Table::note(std::string text) {
  if (rows_.empty()) add({});
  rows_.back().notes.push_back(std::move(text));
}

bool Table::shown(size_t column) const {
  return !columns_[column].optional || std::any_of(rows_.begin(), rows_.end(), [&](const Row& row) { return !row.cells[column].text.empty(); });
}

std::string seconds_text(double s) {
  if (s >= 1) return fmt::format("{:.3f} s", s);
  if (s >= 1e-3) return fmt::format("{:.3f} ms", s * 1e3);
  return fmt::format("{:.2f} us", s * 1e6);
}
std::string bytes_text(double bytes) { return measure::mebibytes(bytes); }
std::string giga_text(double rate) { return fmt::format("{:.{}f}", rate / 1e9, rate >= 100e9 ? 0 : rate >= 10e9 ? 1 : rate >= 1e9 ? 2 : 3); }
std::string percent_text(double fraction) {
  return fraction < 0.1 ? fmt::format("{:.1f} %", 100 * fraction) : fmt::format("{:.0f} %", 100 * fraction);
}
std::string short_text(double value) { return value == 0 ? "0" : fmt::format("{:.1e}", value); }

Cell seconds_cell(double seconds) { return {seconds_text(seconds), fmt::format("{}", seconds)}; }
Cell bytes_cell(double bytes) { return {bytes_text(bytes), fmt::format("{:.0f}", bytes)}; }
Cell giga_cell(double rate) { return {giga_text(rate), fmt::format("{}", rate / 1e9)}; }
Cell percent_cell(double fraction) { return {percent_text(fraction), fmt::format("{}", fraction)}; }
Cell short_cell(double value) { return {short_text(value), fmt::format("{}", value)}; }
Cell count_cell(int64_t count) { return std::to_string(count); }
Cell times_cell(double ratio, bool undecided) {
  const Cell cell(fmt::format("{:.2f}x{}", ratio, undecided ? " (undecided)" : ""), fmt::format("{}", ratio));
  return cell.in(undecided ? Mood::kUnsure : ratio < 1 ? Mood::kBad : Mood::kGood);
}

}  // namespace fattn::cli
