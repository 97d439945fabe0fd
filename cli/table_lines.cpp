// The widths of columns: as wide as cells and headings are, else with headings in several lines, else with wrapped text, else without the columns
// of the highest rank.
#include "cli/table_lines.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <vector>

#include "cli/words.h"

namespace fattn::cli {
namespace {

constexpr size_t kGap = 2, kLeastText = 10;

struct Fit {
  std::vector<size_t> columns, widths;
};

class Layout {
 public:
  Layout(const Table& table, size_t width) : table_(table), width_(width) {}

  // Of these columns the ones that fit beside each other.
  Fit fit(std::vector<size_t> columns) const {
    for (;;) {
      if (std::optional<std::vector<size_t>> widths = widths_of(columns, false)) return {columns, *widths};
      const auto last = std::max_element(columns.begin(), columns.end(), [&](size_t a, size_t b) { return order(a) <= order(b); });
      if (last == columns.end() || order(*last) <= 0) break;
      columns.erase(last);
    }
    for (;;) {
      if (std::optional<std::vector<size_t>> widths = widths_of(columns, true)) return {columns, *widths};
      if (columns.size() == 1) return {columns, {width_}};
      columns.pop_back();
    }
  }

 private:
  int order(size_t column) const { return table_.columns()[column].key ? -1 : table_.columns()[column].rank; }

  size_t cells_width(size_t column) const {
    size_t width = 0;
    for (const Table::Row& row : table_.rows()) width = std::max(width, display_width(row.cells[column].text));
    return width;
  }
  // The least width in which the heading has at most so many lines.
  size_t heading_width(size_t column, size_t lines) const {
    const std::string& name = table_.columns()[column].name;
    if (!table_.headings()) return 0;
    size_t width = 1;
    for (const std::string& word : words_of(name)) width = std::max(width, display_width(word));
    while (wrapped(name, width).size() > lines) ++width;
    return width;
  }
  static std::vector<std::string> words_of(std::string_view text) {
    std::vector<std::string> words(1);
    for (const char c : text) {
      if (c == ' ')
        words.emplace_back();
      else
        words.back() += c;
    }
    return words;
  }

  // None if they do not fit. Headings in two lines are better than wrapped cells, and these better than headings in more; text that is not meant to
  // be wrapped is only `at_last`.
  std::optional<std::vector<size_t>> widths_of(const std::vector<size_t>& columns, bool at_last) const {
    constexpr size_t kMostHeadingLines = 4;
    for (size_t lines = 1; lines <= kMostHeadingLines; ++lines) {
      std::vector<size_t> widths, least;
      for (const size_t column : columns) {
        widths.push_back(std::max(cells_width(column), heading_width(column, lines)));
        const Column& c = table_.columns()[column];
        const size_t narrow = c.least > 0 ? c.least : at_last && c.left ? kLeastText : widths.back();
        least.push_back(std::min(widths.back(), std::max(narrow, heading_width(column, lines))));
      }
      size_t total = kGap * (columns.size() - 1), total_least = total;
      for (const size_t width : widths) total += width;
      for (const size_t width : least) total_least += width;
      if (width_ == 0 || total <= width_) return widths;
      if (lines < 2 || total_least > width_) continue;
      for (; total > width_; --total) {
        size_t widest = columns.size();
        for (size_t i = 0; i < columns.size(); ++i)
          if (widths[i] > least[i] && (widest == columns.size() || widths[i] > widths[widest])) widest = i;
        --widths[widest];
      }
      return widths;
    }
    return std::nullopt;
  }

  const Table& table_;
  const size_t width_;
};

// Cells beside each other, each in as many lines as it needs.
std::string lines_of(const std::vector<Cell>& cells, const std::vector<Column>& columns, const Fit& fit, bool at_bottom, bool colour) {
  std::vector<std::vector<std::string>> parts;
  size_t height = 1;
  for (size_t i = 0; i < fit.columns.size(); ++i) {
    parts.push_back(wrapped(cells[fit.columns[i]].text, std::max<size_t>(1, fit.widths[i])));
    height = std::max(height, parts.back().size());
  }
  std::string all;
  for (size_t line = 0; line < height; ++line) {
    std::string text, pending;  // spaces that something must follow
    for (size_t i = 0; i < fit.columns.size(); ++i) {
      const size_t empty = at_bottom ? height - parts[i].size() : 0;
      const std::string part = line < empty || line - empty >= parts[i].size() ? "" : parts[i][line - empty];
      const size_t space = fit.widths[i] - std::min(fit.widths[i], display_width(part));
      if (i > 0) pending.append(kGap, ' ');
      const bool left = columns[fit.columns[i]].left;
      if (!left) pending.append(space, ' ');
      if (!part.empty()) {
        const Mood mood = cells[fit.columns[i]].mood;
        text += pending + (colour ? painted(part, mood) : part);
        pending.clear();
      }
      if (left) pending.append(space, ' ');
    }
    all += text + "\n";
  }
  return all;
}

std::string dim(const std::string& text, bool colour) { return colour ? "\x1b[2m" + text + "\x1b[0m" : text; }

std::string part_as_lines(const Table& table, const Fit& fit, bool with_notes, const LineOptions& options) {
  std::string text;
  if (table.headings()) {
    std::vector<Cell> names;
    for (const Column& column : table.columns()) names.emplace_back(column.name);
    text = lines_of(names, table.columns(), fit, true, false);
    std::string rule;
    for (const size_t width : fit.widths) rule += (rule.empty() ? "" : std::string(kGap, ' ')) + std::string(width, '-');
    text += dim(rule, options.colour) + "\n";
  }
  for (const Table::Row& row : table.rows()) {
    text += lines_of(row.cells, table.columns(), fit, false, options.colour);
    if (!with_notes) continue;
    for (const std::string& note : row.notes) text += laid_out("    " + note, options.width > 0 ? options.width : std::string::npos / 2);
  }
  return text;
}

}  // namespace

std::string painted(const std::string& text, Mood mood) {
  const char* code = nullptr;
  switch (mood) {
    case Mood::kPlain: return text;
    case Mood::kGood: code = "32"; break;
    case Mood::kBad: code = "31"; break;
    case Mood::kUnsure: code = "33"; break;
    case Mood::kTitle: code = "1"; break;
  }
  return fmt::format("\x1b[{}m{}\x1b[0m", code, text);
}

std::string as_lines(const Table& table, const LineOptions& options) {
  std::vector<size_t> columns, keys;
  for (size_t i = 0; i < table.columns().size(); ++i)
    if (table.shown(i)) {
      columns.push_back(i);
      if (table.columns()[i].key) keys.push_back(i);
    }
  if (columns.empty()) return "";
  const Layout layout(table, options.width);
  std::string text;
  for (bool first = true;; first = false) {
    const Fit fit = layout.fit(columns);
    text += (first ? "" : "\n") + part_as_lines(table, fit, first, options);
    const auto in_this = [&](size_t column) { return std::find(fit.columns.begin(), fit.columns.end(), column) != fit.columns.end(); };
    const auto is_key = [&](size_t column) { return std::find(keys.begin(), keys.end(), column) != keys.end(); };
    std::vector<size_t> rest;
    for (const size_t column : columns)
      if (!in_this(column) && !is_key(column)) rest.push_back(column);
    if (rest.empty()) return text;
    if (!options.in_parts) {
      std::string names;
      for (const size_t column : rest) names += (names.empty() ? "" : ", ") + table.columns()[column].name;
      const std::string note = fmt::format("{} column{} more with --wide: {}", rest.size(), rest.size() == 1 ? "" : "s", names);
      for (const std::string& line : wrapped(note, options.width)) text += dim(line, options.colour) + "\n";
      return text;
    }
    columns = keys;
    columns.insert(columns.end(), rest.begin(), rest.end());
    std::sort(columns.begin(), columns.end());
    // Where the keys alone fill the lines, the rest stands without them.
    if (std::all_of(fit.columns.begin(), fit.columns.end(), is_key)) columns = rest, keys.clear();
  }
}

}  // namespace fattn::cli
