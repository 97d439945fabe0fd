#include "lab/chart/terminal_plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "lab/chart/look.h"
#include "lab/chart/text_size.h"

namespace fattn::lab::chart {
namespace {

constexpr char kMarks[kLooks] = {'o', 'x', '*', '#', '@', '%', '&', '+'};
constexpr int kColours[kLooks] = {36, 33, 32, 35, 34, 31, 96, 37};
constexpr size_t kLeastArea = 16;

// Braille characters have two columns of four dots.
class Canvas {
 public:
  Canvas(size_t columns, size_t rows) : columns_(columns), rows_(rows), cells_(columns * rows) {}

  void dot(double x, double y, int look) {
    const auto column = static_cast<size_t>(x / 2), row = static_cast<size_t>(y / 4);
    if (!(x >= 0) || !(y >= 0) || column >= columns_ || row >= rows_) return;
    constexpr int kBits[4][2] = {{0x01, 0x08}, {0x02, 0x10}, {0x04, 0x20}, {0x40, 0x80}};
    Cell& cell = cells_[row * columns_ + column];
    cell.dots |= kBits[static_cast<size_t>(y) % 4][static_cast<size_t>(x) % 2];
    cell.look = look;
  }
  void line(Place a, Place b, int look) {
    const double steps = std::max({std::fabs(b.x - a.x), std::fabs(b.y - a.y), 1.0});
    // Every second dot, so that marks stand out.
    for (int i = 0; i <= static_cast<int>(steps); i += 2) dot(a.x + i / steps * (b.x - a.x), a.y + i / steps * (b.y - a.y), look);
  }
  void mark(Place at, int look) {
    const size_t column = std::min(static_cast<size_t>(at.x / 2), columns_ - 1), row = std::min(static_cast<size_t>(at.y / 4), rows_ - 1);
    Cell& cell = cells_[row * columns_ + column];
    cell.mark = kMarks[look_of(look)];
    cell.look = look;
  }
  std::string row(size_t r, bool colour) const {
    std::string text;
    for (size_t c = 0; c < columns_; ++c) {
      const Cell& cell = cells_[r * columns_ + c];
      std::string shown = " ";
      if (cell.mark != 0)
        shown = std::string(1, cell.mark);
      else if (cell.dots != 0)  // U+2800 and its dots
        shown = {'\xE2', static_cast<char>(0xA0 | (cell.dots >> 6)), static_cast<char>(0x80 | (cell.dots & 0x3F))};
      text += colour && shown != " " ? fmt::format("\x1b[{}m{}\x1b[0m", kColours[look_of(cell.look)], shown) : shown;
    }
    text.erase(text.find_last_not_of(' ') + 1);
    return text;
  }

 private:
  struct Cell {
    int dots = 0, look = 0;
    char mark = 0;
  };
  size_t columns_, rows_;
  std::vector<Cell> cells_;
};

// Labels under an axis, each centred at its place where the one before leaves room.
std::string labels_below(const Scale& x, const std::vector<Tick>& ticks, size_t columns) {
  std::string line(columns, ' ');
  size_t free = 0;
  for (const Tick& tick : ticks) {
    const auto centre = static_cast<size_t>(std::clamp(x.at(tick.value) / 2, 0.0, static_cast<double>(columns - 1)));
    const size_t length = tick.label.size();
    if (length > columns) continue;
    const size_t begin = std::min(centre - std::min(centre, length / 2), columns - length);
    if (begin < free) continue;
    line.replace(begin, length, tick.label);
    free = begin + length + 1;
  }
  line.erase(line.find_last_not_of(' ') + 1);
  return line;
}

}  // namespace

std::string terminal_plot(const Panel& panel, const TerminalPlot& how) {
  Extent xs, ys;
  for (const Line& line : panel.lines)
    for (const Point& point : line.points)
      if (std::isfinite(point.x) && std::isfinite(point.y)) xs.cover(point.x, panel.x.scale), ys.cover(point.y, panel.y.scale);
  if (xs.empty() || ys.empty() || panel.x.scale == ScaleKind::kBand || how.height == 0) return "";

  const double bottom = static_cast<double>(4 * how.height);
  const Scale y(panel.y.scale, ys, panel.y.from_zero, bottom, 0);
  const std::vector<Tick> y_ticks = y.ticks(panel.y.unit, std::max<size_t>(how.height / 2, 2));
  size_t margin = 0;
  for (const Tick& tick : y_ticks) margin = std::max(margin, tick.label.size());
  constexpr size_t kIndent = 2, kAxis = 2;
  if (how.width < kIndent + margin + kAxis + kLeastArea) return "";
  const size_t columns = how.width - kIndent - margin - kAxis;
  const Scale x(panel.x.scale, xs, panel.x.from_zero, 0, static_cast<double>(2 * columns));

  Canvas canvas(columns, how.height);
  for (const Line& line : panel.lines) {
    const Point* before = nullptr;
    for (const Point& point : line.points) {
      const bool there = x.takes(point.x) && y.takes(point.y);
      if (there && before && line.connected) canvas.line({x.at(before->x), y.at(before->y)}, {x.at(point.x), y.at(point.y)}, line.look);
      before = there ? &point : nullptr;
    }
  }
  for (const Line& line : panel.lines)
    for (const Point& point : line.points)
      if (line.marked && x.takes(point.x) && y.takes(point.y)) canvas.mark({x.at(point.x), y.at(point.y)}, line.look);

  std::string text = fmt::format("{:{}}{}\n", "", kIndent, panel.title);
  for (size_t row = 0; row < how.height; ++row) {
    std::string label;
    for (const Tick& tick : y_ticks)
      if (static_cast<size_t>(std::clamp(y.at(tick.value) / 4, 0.0, static_cast<double>(how.height - 1))) == row) label = tick.label;
    text += fmt::format("{:{}}{:>{}} {}{}\n", "", kIndent, label, margin, label.empty() ? "│" : "┤", canvas.row(row, how.colour));
  }
  text += fmt::format("{:{}}{:>{}} └", "", kIndent, "", margin);
  for (size_t i = 0; i < columns; ++i) text += "─";
  // One place for a label takes about eight columns.
  text += fmt::format("\n{:{}}{}\n", "", kIndent + margin + kAxis, labels_below(x, x.ticks(panel.x.unit, std::max<size_t>(columns / 8, 2)), columns));
  std::string legend;
  for (const Line& line : panel.lines) {
    const std::string mark(1, kMarks[look_of(line.look)]);
    legend += legend.empty() ? "" : "   ";
    legend += (how.colour ? fmt::format("\x1b[{}m{}\x1b[0m", kColours[look_of(line.look)], mark) : mark) + " " + line.name;
  }
  text += fmt::format("{:{}}{}{}\n", "", kIndent + margin + kAxis, panel.x.title, legend.empty() ? "" : "   " + legend);
  return text;
}

}  // namespace fattn::lab::chart
