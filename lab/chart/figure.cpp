// A figure: title, legend, panels in a grid, notes.
#include <fmt/format.h>

#include <algorithm>

#include "lab/chart/chart.h"
#include "lab/chart/look.h"
#include "lab/chart/panel.h"
#include "lab/chart/svg.h"
#include "lab/chart/text_size.h"

namespace fattn::lab::chart {
namespace {

constexpr double kTitleSize = 17, kTitleLine = 22, kText = 13, kLegendLine = 20, kNoteLine = 16, kEdge = 8, kGap = 14;

struct Entry {
  std::string name;
  int look = 0;
  bool bars = false, connected = true, marked = true;
};

// Every name once, in the order of the panels; one that has a line somewhere is shown as that.
std::vector<Entry> legend_of(const Figure& figure) {
  std::vector<Entry> entries;
  const auto add = [&](Entry entry) {
    if (entry.name.empty()) return;
    const auto known = std::find_if(entries.begin(), entries.end(), [&](const Entry& e) { return e.name == entry.name; });
    if (known == entries.end())
      entries.push_back(std::move(entry));
    else if (known->bars && !entry.bars)
      *known = std::move(entry);
  };
  for (const Panel& panel : figure.panels) {
    for (const Line& line : panel.lines) add({line.name, line.look, false, line.connected, line.marked});
    for (const Bars& bars : panel.bars) add({bars.name, bars.look, true});
  }
  return entries;
}

struct LegendPlace {
  Entry entry;
  Place at;
};

// Beside each other, in as many lines as they need.
std::vector<LegendPlace> laid_out(const std::vector<Entry>& entries, double width, double top, double& bottom) {
  std::vector<LegendPlace> places;
  double x = kEdge;
  bottom = top;
  if (entries.empty()) return places;
  for (const Entry& entry : entries) {
    const double wide = 36 + width_of_text(entry.name, kText) + 18;
    if (x > kEdge && x + wide > width) x = kEdge, bottom += kLegendLine;
    places.push_back({entry, {x, bottom}});
    x += wide;
  }
  bottom += kLegendLine;
  return places;
}

void draw_legend(Svg& svg, const std::vector<LegendPlace>& places, double width) {
  for (const auto& [entry, at] : places) {
    const double y = at.y + 10;
    if (entry.bars) {
      svg.empty("rect",
                {{"class", colour_class(entry.look)}, {"x", coordinate(at.x + 8)}, {"y", coordinate(y - 6)}, {"width", "14"}, {"height", "12"}});
    } else {
      if (entry.connected)
        svg.empty("path", {{"class", "l " + colour_class(entry.look)},
                           {"d", path_through({{at.x, y}, {at.x + 30, y}})},
                           {"stroke-dasharray", dashes_of(entry.look)}});
      if (entry.marked) draw_marker(svg, entry.look, {at.x + 15, y}, entry.name);
    }
    svg.text("text", {{"x", coordinate(at.x + 36)}, {"y", coordinate(y + 4.5)}}, cut_to_width(entry.name, kText, width - at.x - 40));
  }
}

}  // namespace

std::string to_svg(const Figure& figure) {
  const size_t columns = std::clamp<size_t>(static_cast<size_t>(std::max(figure.columns, 1)), 1, std::max<size_t>(figure.panels.size(), 1));
  const double width = static_cast<double>(columns) * kPanelWidth;

  // From top to bottom, then it is known how high all of it is.
  const std::vector<std::string> title =
      figure.title.empty() ? std::vector<std::string>() : lines_of_text(figure.title, kTitleSize * 1.05, width - 2 * kEdge);
  double y = 6 + static_cast<double>(title.size()) * kTitleLine;
  double legend_end = y;
  const std::vector<LegendPlace> legend = laid_out(legend_of(figure), width, y + 4, legend_end);
  y = legend_end + 8;
  struct Placed {
    const Panel* panel;
    Place at;
    double head;
  };
  std::vector<Placed> placed;
  for (size_t first = 0; first < figure.panels.size(); first += columns) {
    const size_t end = std::min(first + columns, figure.panels.size());
    double head = 0, foot = 0;
    for (size_t i = first; i < end; ++i) head = std::max(head, head_of(figure.panels[i])), foot = std::max(foot, foot_of(figure.panels[i]));
    for (size_t i = first; i < end; ++i) placed.push_back({&figure.panels[i], {static_cast<double>(i - first) * kPanelWidth, y}, head});
    y += head + kPlotHeight + foot + kGap;
  }
  const std::vector<std::string> note = figure.note.empty() ? std::vector<std::string>() : lines_of_text(figure.note, 12, width - 2 * kEdge);
  const double note_at = y + 6;
  const double height = note_at + static_cast<double>(note.size()) * kNoteLine + 4;

  Svg svg;
  const std::string title_id = figure.id + "-title", text_id = figure.id + "-text";
  svg.open("svg", {{"xmlns", "http://www.w3.org/2000/svg"},
                   {"class", "fc"},
                   {"viewBox", fmt::format("0 0 {} {}", coordinate(width), coordinate(height))},
                   {"width", coordinate(width)},
                   {"height", coordinate(height)},
                   {"style", "max-width:100%;height:auto"},
                   {"role", "img"},
                   {"aria-labelledby", title_id + " " + text_id},
                   {"xml:lang", figure.language},
                   {"lang", figure.language}});
  svg.text("title", {{"id", title_id}}, figure.title);
  std::string words = figure.description;
  for (const Panel& panel : figure.panels) words += (words.empty() ? "" : "\n") + words_of(panel);
  svg.text("desc", {{"id", text_id}}, words);
  svg.style(style_sheet());
  svg.empty("rect", {{"class", "ground"}, {"width", coordinate(width)}, {"height", coordinate(height)}, {"rx", "6"}});
  for (size_t i = 0; i < title.size(); ++i)
    svg.text("text", {{"class", "t"}, {"x", coordinate(kEdge)}, {"y", coordinate(20 + static_cast<double>(i) * kTitleLine)}}, title[i]);
  draw_legend(svg, legend, width);
  for (const Placed& one : placed) draw_panel(svg, *one.panel, one.at, one.head);
  for (size_t i = 0; i < note.size(); ++i)
    svg.text("text", {{"class", "q s"}, {"x", coordinate(kEdge)}, {"y", coordinate(note_at + 8 + static_cast<double>(i) * kNoteLine)}}, note[i]);
  svg.close();
  return svg.whole();
}

}  // namespace fattn::lab::chart
