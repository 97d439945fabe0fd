#include "lab/chart/panel.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "lab/chart/look.h"
#include "lab/chart/text_size.h"

namespace fattn::lab::chart {
namespace {

constexpr double kTitleSize = 14, kTitleLine = 18, kSmall = 12, kSmallLine = 16, kLabelSize = 11;
constexpr double kEdge = 8, kRight = 16, kSample = 28;

std::vector<std::string> title_lines(const Panel& panel) { return lines_of_text(panel.title, kTitleSize, kPanelWidth - 2 * kEdge); }

std::vector<std::string> note_lines(const Panel& panel) {
  return panel.note.empty() ? std::vector<std::string>() : lines_of_text(panel.note, kSmall, kPanelWidth - 2 * kEdge);
}

bool banded(const Panel& panel) { return panel.x.scale == ScaleKind::kBand; }

std::string label_of(const Panel& panel, const Bars& bars, size_t i) {
  if (i < bars.labels.size()) return bars.labels[i];
  return std::isfinite(bars.values[i]) ? text_of(panel.y.unit, bars.values[i]) : "";
}

// Labels that are wider than their bar stand upright, as those without a bar do.
bool upright_labels(const Panel& panel, double bar_width) {
  for (const Bars& bars : panel.bars)
    for (size_t i = 0; i < bars.values.size(); ++i)
      if (std::isfinite(bars.values[i]) && width_of_text(label_of(panel, bars, i), kLabelSize) > bar_width) return true;
  return false;
}

// The panel's two scales, with the margin that the labels on the left need.
class Frame {
 public:
  Frame(const Panel& panel, Place corner, double head) : panel_(panel), top_(corner.y + head), bottom_(top_ + kPlotHeight) {
    y_.emplace(panel.y.scale == ScaleKind::kBand ? ScaleKind::kLinear : panel.y.scale, values_of_y(), panel.y.from_zero, bottom_, top_);
    y_ticks_ = y_->ticks(panel.y.unit, 6);
    double widest = 0;
    for (const Tick& tick : y_ticks_) widest = std::max(widest, width_of_text(tick.label, kSmall));
    left_ = corner.x + kEdge + widest + 6;
    right_ = corner.x + kPanelWidth - kRight;
    if (banded(panel)) {
      x_.emplace(panel.x.categories.size(), left_, right_);
      for (size_t i = 0; i < panel.x.categories.size(); ++i) x_ticks_.push_back({static_cast<double>(i), panel.x.categories[i]});
    } else {
      x_.emplace(panel.x.scale, values_of_x(), panel.x.from_zero, left_, right_);
      for (size_t most = 9; most >= 2; --most)
        if (x_ticks_ = x_->ticks(panel.x.unit, most); fits()) break;
    }
  }

  const Scale& x() const { return *x_; }
  const Scale& y() const { return *y_; }
  const std::vector<Tick>& x_ticks() const { return x_ticks_; }
  const std::vector<Tick>& y_ticks() const { return y_ticks_; }
  double left() const { return left_; }
  double right() const { return right_; }
  double top() const { return top_; }
  double bottom() const { return bottom_; }

  bool takes(const Point& point) const { return x_->takes(point.x) && y_->takes(point.y); }
  Place at(double x, double y) const { return {x_->at(x), y_->at(y)}; }
  // Where a bar begins: its value of 0, or the axis where a logarithmic one has none.
  double ground() const { return y_->logarithmic() || y_->low() > 0 ? bottom_ : std::min(y_->at(0), bottom_); }

 private:
  bool fits() const {
    for (size_t i = 1; i < x_ticks_.size(); ++i) {
      const double widths = width_of_text(x_ticks_[i - 1].label, kSmall) + width_of_text(x_ticks_[i].label, kSmall);
      if (x_->at(x_ticks_[i].value) - x_->at(x_ticks_[i - 1].value) < widths / 2 + 6) return false;
    }
    return true;
  }
  Extent values_of_x() const {
    Extent extent;
    for (const Line& line : panel_.lines)
      for (const Point& point : line.points) extent.cover(point.x, panel_.x.scale);
    for (const Reference& reference : panel_.references)
      if (reference.kind == Reference::Kind::kUpright) extent.cover(reference.value, panel_.x.scale);
    extent.cover(panel_.x.covers_from, panel_.x.scale), extent.cover(panel_.x.covers_to, panel_.x.scale);
    return extent;
  }
  Extent values_of_y() const {
    Extent extent;
    for (const Line& line : panel_.lines)
      for (const Point& point : line.points)
        for (const double value : {point.y, point.low, point.high}) extent.cover(value, panel_.y.scale);
    double highest_bar = kNotKnown;
    for (const Bars& bars : panel_.bars)
      for (const double value : bars.values) extent.cover(value, panel_.y.scale), highest_bar = std::fmax(highest_bar, value);
    for (const Reference& reference : panel_.references)
      if (reference.kind == Reference::Kind::kLevel) extent.cover(reference.value, panel_.y.scale);
    extent.cover(panel_.y.covers_from, panel_.y.scale), extent.cover(panel_.y.covers_to, panel_.y.scale);
    // Room for the labels above the bars.
    if (highest_bar > 0) {
      const double bar = (kPanelWidth - 80) / static_cast<double>(std::max<size_t>(panel_.x.categories.size() * panel_.bars.size(), 1)) * 0.8;
      extent.cover(highest_bar * (upright_labels(panel_, bar) ? 1.28 : 1.08), panel_.y.scale);
    }
    return extent;
  }

  const Panel& panel_;
  double top_, bottom_, left_ = 0, right_ = 0;
  std::optional<Scale> x_, y_;
  std::vector<Tick> x_ticks_, y_ticks_;
};

void draw_axes(Svg& svg, const Frame& frame, const Panel& panel, Place corner) {
  for (const Tick& tick : frame.y_ticks()) {
    const double y = frame.y().at(tick.value);
    svg.empty("line",
              {{"class", "g"}, {"x1", coordinate(frame.left())}, {"y1", coordinate(y)}, {"x2", coordinate(frame.right())}, {"y2", coordinate(y)}});
    svg.text("text", {{"class", "s"}, {"x", coordinate(frame.left() - 6)}, {"y", coordinate(y + 4)}, {"text-anchor", "end"}}, tick.label);
  }
  const double band = banded(panel) ? frame.x().band_width() : kPanelWidth;
  for (const Tick& tick : frame.x_ticks()) {
    const double x = frame.x().at(tick.value);
    if (!banded(panel))
      svg.empty("line",
                {{"class", "g"}, {"x1", coordinate(x)}, {"y1", coordinate(frame.top())}, {"x2", coordinate(x)}, {"y2", coordinate(frame.bottom())}});
    svg.text("text", {{"class", "s"}, {"x", coordinate(x)}, {"y", coordinate(frame.bottom() + 17)}, {"text-anchor", "middle"}},
             cut_to_width(tick.label, kSmall, band));
  }
  svg.empty("line", {{"class", "a"},
                     {"x1", coordinate(frame.left())},
                     {"y1", coordinate(frame.bottom())},
                     {"x2", coordinate(frame.right())},
                     {"y2", coordinate(frame.bottom())}});
  svg.text("text", {{"class", "s"}, {"x", coordinate(corner.x + kEdge)}, {"y", coordinate(frame.top() - 8)}}, panel.y.title);
  svg.text("text",
           {{"class", "s"}, {"x", coordinate((frame.left() + frame.right()) / 2)}, {"y", coordinate(frame.bottom() + 35)}, {"text-anchor", "middle"}},
           panel.x.title);
}

// The part of a straight line that is in the plot area.
std::optional<std::pair<Place, Place>> clipped(const Frame& frame, Place a, Place b) {
  double from = 0, to = 1;
  const auto cut = [&](double step, double room) {  // step * t <= room
    if (step == 0) return room >= 0;
    const double t = room / step;
    if (step > 0)
      to = std::min(to, t);
    else
      from = std::max(from, t);
    return from <= to;
  };
  const double dx = b.x - a.x, dy = b.y - a.y;
  if (!cut(-dx, a.x - frame.left()) || !cut(dx, frame.right() - a.x) || !cut(-dy, a.y - frame.top()) || !cut(dy, frame.bottom() - a.y))
    return std::nullopt;
  // Of a line that begins very far away only the first digits of its places are right.
  const auto inside = [&](double t) {
    return Place{std::clamp(a.x + t * dx, frame.left(), frame.right()), std::clamp(a.y + t * dy, frame.top(), frame.bottom())};
  };
  return std::pair{inside(from), inside(to)};
}

void draw_reference(Svg& svg, const Frame& frame, const Reference& reference) {
  const std::string look = "r " + colour_class(reference.look);
  const auto draw = [&](Place a, Place b) {
    if (const auto part = clipped(frame, a, b))
      svg.empty("path", {{"class", look}, {"d", path_through({part->first, part->second})}, {"stroke-dasharray", dashes_of(-1)}});
  };
  const Scale &x = frame.x(), &y = frame.y();
  if (reference.kind == Reference::Kind::kLevel && y.takes(reference.value))
    draw({frame.left(), y.at(reference.value)}, {frame.right(), y.at(reference.value)});
  if (reference.kind == Reference::Kind::kUpright && x.takes(reference.value))
    draw({x.at(reference.value), frame.bottom()}, {x.at(reference.value), frame.top()});
  if (reference.kind != Reference::Kind::kPower) return;
  // Straight between two places where both axes are logarithmic; many short pieces else.
  const int pieces = x.logarithmic() && y.logarithmic() ? 1 : 32;
  std::optional<Place> before;
  for (int i = 0; i <= pieces; ++i) {
    const double share = static_cast<double>(i) / pieces;
    const double at = x.logarithmic() ? x.low() * std::pow(x.high() / x.low(), share) : x.low() + share * (x.high() - x.low());
    const double value = reference.value * std::pow(at, reference.exponent);
    const std::optional<Place> now = y.takes(value) ? std::optional(frame.at(at, value)) : std::nullopt;
    if (before && now) draw(*before, *now);
    before = now;
  }
}

void draw_band(Svg& svg, const Frame& frame, const Line& line) {
  std::vector<Place> above, below;
  const auto end = [&] {
    if (above.size() > 1) {
      std::vector<Place> outline = above;
      outline.insert(outline.end(), below.rbegin(), below.rend());
      svg.empty("path", {{"class", "b " + colour_class(line.look)}, {"d", path_through(outline, true)}});
    }
    above.clear(), below.clear();
  };
  for (const Point& point : line.points) {
    if (!frame.takes(point) || !frame.y().takes(point.low) || !frame.y().takes(point.high)) {
      end();
      continue;
    }
    above.push_back(frame.at(point.x, point.high));
    below.push_back(frame.at(point.x, point.low));
  }
  end();
}

void draw_line(Svg& svg, const Frame& frame, const Panel& panel, const Line& line) {
  if (line.connected) {
    std::vector<Place> places;
    const auto end = [&] {
      if (places.size() > 1)
        svg.empty("path", {{"class", "l " + colour_class(line.look)}, {"d", path_through(places)}, {"stroke-dasharray", dashes_of(line.look)}});
      places.clear();
    };
    for (const Point& point : line.points)
      if (frame.takes(point))
        places.push_back(frame.at(point.x, point.y));
      else
        end();
    end();
  }
  if (!line.marked) return;
  for (const Point& point : line.points)
    if (frame.takes(point))
      draw_marker(svg, line.look, frame.at(point.x, point.y),
                  fmt::format("{}: {}, {}", line.name, text_of(panel.x.unit, point.x), text_of(panel.y.unit, point.y)));
}

void draw_bars(Svg& svg, const Frame& frame, const Panel& panel) {
  const double group = 0.8 * frame.x().band_width(), width = group / static_cast<double>(std::max<size_t>(panel.bars.size(), 1));
  const bool upright = upright_labels(panel, width);
  for (size_t b = 0; b < panel.bars.size(); ++b) {
    const Bars& bars = panel.bars[b];
    for (size_t i = 0; i < std::min(bars.values.size(), panel.x.categories.size()); ++i) {
      const double value = bars.values[i];
      const double left = frame.x().at(static_cast<double>(i)) - group / 2 + static_cast<double>(b) * width;
      const bool there = frame.y().takes(value);
      const double top = there ? std::min(frame.y().at(value), frame.ground()) : frame.ground();
      if (there)
        svg.titled("rect",
                   {{"class", colour_class(bars.look)},
                    {"x", coordinate(left + 1)},
                    {"y", coordinate(top)},
                    {"width", coordinate(std::max(width - 2, 1.0))},
                    {"height", coordinate(std::max(frame.y().at(value), frame.ground()) - top)}},
                   fmt::format("{}, {}: {}", bars.name, panel.x.categories[i], text_of(panel.y.unit, value)));
      const std::string label = label_of(panel, bars, i);
      if (label.empty()) continue;
      const double x = left + width / 2, y = top - 5;
      if (upright || !there)
        svg.text("text",
                 {{"class", "v"},
                  {"x", coordinate(x + 4)},
                  {"y", coordinate(y)},
                  {"transform", fmt::format("rotate(-90 {} {})", coordinate(x + 4), coordinate(y))}},
                 cut_to_width(label, kLabelSize, y - frame.top()));
      else
        svg.text("text", {{"class", "v"}, {"x", coordinate(x)}, {"y", coordinate(y)}, {"text-anchor", "middle"}}, label);
    }
  }
}

bool shows_something(const Frame& frame, const Panel& panel) {
  for (const Line& line : panel.lines)
    if (std::any_of(line.points.begin(), line.points.end(), [&](const Point& point) { return frame.takes(point); })) return true;
  for (const Bars& bars : panel.bars)
    if (std::any_of(bars.values.begin(), bars.values.end(), [&](double value) { return frame.y().takes(value); })) return true;
  return false;
}

}  // namespace

double head_of(const Panel& panel) {
  return static_cast<double>(title_lines(panel).size()) * kTitleLine + static_cast<double>(panel.references.size()) * kSmallLine + kSmallLine + 12;
}

double foot_of(const Panel& panel) { return 46 + static_cast<double>(note_lines(panel).size()) * kSmallLine; }

void draw_panel(Svg& svg, const Panel& panel, Place corner, double head) {
  svg.open("g", {{"role", "group"}, {"aria-label", panel.title}});
  double y = corner.y + 15;
  for (const std::string& line : title_lines(panel)) {
    svg.text("text", {{"class", "p"}, {"x", coordinate(corner.x + kEdge)}, {"y", coordinate(y)}}, line);
    y += kTitleLine;
  }
  const Frame frame(panel, corner, head);
  if (!shows_something(frame, panel)) {
    svg.empty("rect", {{"class", "r cr"},
                       {"x", coordinate(frame.left())},
                       {"y", coordinate(frame.top())},
                       {"width", coordinate(frame.right() - frame.left())},
                       {"height", coordinate(kPlotHeight)},
                       {"stroke-dasharray", "2 4"}});
    double line_at = frame.top() + kPlotHeight / 2;
    for (const std::string& line : lines_of_text(panel.nothing, 13, frame.right() - frame.left() - 20)) {
      svg.text("text", {{"x", coordinate((frame.left() + frame.right()) / 2)}, {"y", coordinate(line_at)}, {"text-anchor", "middle"}}, line);
      line_at += 17;
    }
  } else {
    for (const Reference& reference : panel.references) {
      svg.empty("path", {{"class", "r " + colour_class(reference.look)},
                         {"d", path_through({{corner.x + kEdge, y - 4}, {corner.x + kEdge + kSample, y - 4}})},
                         {"stroke-dasharray", dashes_of(-1)}});
      svg.text("text", {{"class", "s"}, {"x", coordinate(corner.x + kEdge + kSample + 6)}, {"y", coordinate(y)}},
               cut_to_width(reference.label, kSmall, kPanelWidth - kSample - 2 * kEdge - 6));
      y += kSmallLine;
    }
    draw_axes(svg, frame, panel, corner);
    for (const Line& line : panel.lines) draw_band(svg, frame, line);
    for (const Reference& reference : panel.references) draw_reference(svg, frame, reference);
    for (const Line& line : panel.lines) draw_line(svg, frame, panel, line);
    if (banded(panel)) draw_bars(svg, frame, panel);
  }
  double note_at = frame.bottom() + 53;
  for (const std::string& line : note_lines(panel)) {
    svg.text("text", {{"class", "q s"}, {"x", coordinate(corner.x + kEdge)}, {"y", coordinate(note_at)}}, line);
    note_at += kSmallLine;
  }
  svg.close();
}

std::string words_of(const Panel& panel) {
  std::string words = panel.title + ":";
  const auto point = [&](const Point& p) { return fmt::format("{} at {}", text_of(panel.y.unit, p.y), text_of(panel.x.unit, p.x)); };
  for (const Line& line : panel.lines) {
    std::vector<Point> there;
    std::copy_if(line.points.begin(), line.points.end(), std::back_inserter(there),
                 [](const Point& p) { return std::isfinite(p.x) && std::isfinite(p.y); });
    if (there.empty())
      words += fmt::format(" {}: nothing;", line.name);
    else if (there.size() == 1 || !line.connected)
      words += fmt::format(" {}: {} point{}, first {};", line.name, there.size(), there.size() == 1 ? "" : "s", point(there.front()));
    else
      words += fmt::format(" {}: from {} to {};", line.name, point(there.front()), point(there.back()));
  }
  for (const Bars& bars : panel.bars)
    for (size_t i = 0; i < std::min(bars.values.size(), panel.x.categories.size()); ++i)
      words += fmt::format(" {}, {}: {};", bars.name, panel.x.categories[i],
                           std::isfinite(bars.values[i]) ? text_of(panel.y.unit, bars.values[i]) : label_of(panel, bars, i));
  for (const Reference& reference : panel.references) words += " " + reference.label + ";";
  if (words.back() == ':') return words + " " + panel.nothing + ".";
  words.back() = '.';
  return words;
}

}  // namespace fattn::lab::chart
