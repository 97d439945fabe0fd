// Aligned text tables.
#include "cli/table.h"

#include <fmt/format.h>

#include <algorithm>

#include "measure/memory.h"

namespace fattn::cli {
namespace {

// Characters, not bytes, of UTF-8.
size_t width_of(const std::string& text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0u) != 0x80u; }));
}

std::string padded(const std::string& text, size_t width, bool left) {
  const std::string space(width - std::min(width, width_of(text)), ' ');
  return left ? text + space : space + text;
}

}  // namespace

Table::Table(std::vector<std::string> columns) : columns_(std::move(columns)) {
  for (std::string& column : columns_) {
    left_.push_back(!column.empty() && column[0] == '<');
    optional_.push_back(!column.empty() && column[0] == '?');
    if (left_.back() || optional_.back()) column.erase(0, 1);
  }
}

void Table::add(std::vector<std::string> cells) {
  cells.resize(columns_.size());
  lines_.push_back({std::move(cells), {}});
}

void Table::note(std::string text) { lines_.push_back({{}, std::move(text)}); }

void Table::print(std::FILE* out) const {
  std::vector<size_t> widths;
  std::vector<bool> shown;
  for (size_t i = 0; i < columns_.size(); ++i) {
    widths.push_back(width_of(columns_[i]));
    shown.push_back(!optional_[i] ||
                    std::any_of(lines_.begin(), lines_.end(), [i](const Line& l) { return !l.cells.empty() && !l.cells[i].empty(); }));
  }
  for (const Line& line : lines_)
    for (size_t i = 0; i < line.cells.size(); ++i) widths[i] = std::max(widths[i], width_of(line.cells[i]));
  auto print_cells = [&](const std::vector<std::string>& cells) {
    std::string text;
    for (size_t i = 0; i < cells.size(); ++i)
      if (shown[i]) text += (i ? "  " : "") + padded(cells[i], widths[i], left_[i]);
    text.erase(text.find_last_not_of(' ') + 1);
    fmt::print(out, "{}\n", text);
  };
  print_cells(columns_);
  std::vector<std::string> rules;
  rules.reserve(widths.size());
  for (size_t width : widths) rules.emplace_back(width, '-');
  print_cells(rules);
  for (const Line& line : lines_) {
    if (line.cells.empty())
      fmt::print(out, "    {}\n", line.text);
    else
      print_cells(line.cells);
  }
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

}  // namespace fattn::cli
