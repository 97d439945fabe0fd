// Charts: golden files that a person looked at (FATTN_RENEW_GOLDEN=1 writes them anew: look at them again), and what holds for all of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>

#include "golden_charts.h"
#include "lab/chart/look.h"
#include "lab/chart/svg.h"
#include "lab/chart/terminal_plot.h"
#include "lab/chart/text_size.h"

namespace fattn::lab::chart {
namespace {

void expect_golden(const std::string& name, const Figure& figure) {
  const std::string path = std::string(FATTN_GOLDEN) + "/" + name + ".svg", now = to_svg(figure);
  if (std::getenv("FATTN_RENEW_GOLDEN")) std::ofstream(path, std::ios::binary) << now;
  std::ifstream file(path, std::ios::binary);
  std::ostringstream kept;
  kept << file.rdbuf();
  EXPECT_TRUE(kept.str() == now) << path
                                 << " differs from what is drawn now; if that is meant, write it anew with FATTN_RENEW_GOLDEN=1 and look at it";
}

TEST(LabChart, Golden) {
  for (const auto& [name, figure] : golden_charts()) expect_golden(name, figure);
}

TEST(LabChart, TheSameInputGivesTheSameBytes) {
  for (const auto& [name, figure] : golden_charts()) EXPECT_EQ(to_svg(figure), to_svg(figure)) << name;
}

// Every coordinate that a marker, a line or a bar has.
std::vector<Place> drawn(const std::string& svg) {
  std::vector<Place> places;
  static const std::regex path("<path class=\"[lbmr][^\"]*\" d=\"([^\"]*)\""), pair("[ML](-?[0-9.]+) (-?[0-9.]+)"),
      circle("cx=\"(-?[0-9.]+)\" cy=\"(-?[0-9.]+)\"");
  for (std::sregex_iterator it(svg.begin(), svg.end(), path), end; it != end; ++it) {
    const std::string d = (*it)[1];
    for (std::sregex_iterator p(d.begin(), d.end(), pair); p != end; ++p) places.push_back({std::stod((*p)[1]), std::stod((*p)[2])});
  }
  for (std::sregex_iterator it(svg.begin(), svg.end(), circle), end; it != end; ++it) places.push_back({std::stod((*it)[1]), std::stod((*it)[2])});
  return places;
}

Figure one_panel(const Axis& x, const Axis& y, const std::vector<Point>& points) {
  Panel panel;
  panel.title = "p";
  panel.x = x, panel.y = y;
  panel.lines.push_back({"", 0, points});
  panel.references.push_back({Reference::Kind::kPower, "steep", 1e-3, 3});
  return {"t", "d", {panel}, 1};
}

TEST(LabChart, AllPointsAreInsideTheFigure) {
  for (const ScaleKind kind : {ScaleKind::kLinear, ScaleKind::kLog2, ScaleKind::kLog10})
    for (const double size : {1e-9, 1.0, 3e7, 1e12}) {
      std::vector<Point> points;
      for (int i = 1; i < 9; ++i) points.push_back({i * size, i * i * size, i * size, 3 * i * i * size});
      points.push_back({-size, kNotKnown});
      const Figure figure = one_panel({"x", kind}, {"y", kind, Unit::kTime}, points);
      const std::string svg = to_svg(figure);
      const std::vector<Place> places = drawn(svg);
      ASSERT_GE(places.size(), 8U);
      for (const Place& place : places) {
        EXPECT_GE(place.x, 0);
        EXPECT_LE(place.x, kPanelWidth);
        EXPECT_GE(place.y, 40) << svg;
        EXPECT_LE(place.y, 400);
      }
      EXPECT_EQ(svg.find("nan"), std::string::npos);
      EXPECT_EQ(svg.find("inf"), std::string::npos);
    }
}

size_t count(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; ++at) ++n;
  return n;
}

TEST(LabChart, PointsThatAreNoNumbersBreakTheLine) {
  const double inf = std::numeric_limits<double>::infinity();
  const std::vector<Point> whole = {{1, 1}, {2, 2}, {3, 3}, {4, 4}, {5, 5}}, broken = {{1, 1}, {2, 2}, {3, kNotKnown}, {4, 4}, {5, 5}},
                           endless = {{1, 1}, {2, 2}, {3, inf}, {4, 4}, {5, 5}}, below = {{1, 1}, {2, 2}, {3, 0}, {4, 4}, {5, 5}};
  const Axis linear{"x"}, logarithmic{"y", ScaleKind::kLog10};
  EXPECT_EQ(count(to_svg(one_panel(linear, linear, whole)), "class=\"l c0\""), 1U);
  EXPECT_EQ(count(to_svg(one_panel(linear, linear, broken)), "class=\"l c0\""), 2U);
  EXPECT_EQ(count(to_svg(one_panel(linear, linear, endless)), "class=\"l c0\""), 2U);
  EXPECT_EQ(count(to_svg(one_panel(linear, logarithmic, below)), "class=\"l c0\""), 2U);
  EXPECT_EQ(count(to_svg(one_panel(linear, linear, below)), "class=\"l c0\""), 1U);
  EXPECT_EQ(count(to_svg(one_panel(linear, linear, broken)), "<circle"), 4U);
}

TEST(LabChart, NothingToShowIsSaid) {
  Panel panel;
  panel.title = "Backward";
  panel.nothing = "the backward pass was not measured";
  panel.lines.push_back({"fattn", 0, {{512, kNotKnown}}});
  for (const ScaleKind kind : {ScaleKind::kLinear, ScaleKind::kLog2, ScaleKind::kLog10, ScaleKind::kBand}) {
    panel.x.scale = panel.y.scale = kind;
    const std::string svg = to_svg({"t", "", {panel}});
    EXPECT_EQ(count(svg, ">the backward pass was not measured<"), 1U) << svg;
    EXPECT_EQ(svg.find("nan"), std::string::npos);
  }
  EXPECT_NE(to_svg({}).find("<svg"), std::string::npos);
}

TEST(LabChart, TextIsEscaped) {
  const std::string evil = "<script>alert(\"1\")</script>&";
  Panel panel;
  panel.title = panel.note = panel.x.title = panel.y.title = evil;
  panel.lines.push_back({evil, 0, {{1, 1}, {2, 2}}});
  panel.references.push_back({Reference::Kind::kLevel, evil, 1});
  Panel bars;
  bars.x = {evil, ScaleKind::kBand, Unit::kPlain, {evil}};
  bars.bars.push_back({evil, 1, {1}, {evil}});
  const std::string svg = to_svg({evil, evil, {panel, bars}, 2, evil, "\"><b>", "\"><b>"});
  EXPECT_EQ(svg.find("<script"), std::string::npos);
  EXPECT_EQ(svg.find("\"><b"), std::string::npos);
  EXPECT_GE(count(svg, "&lt;script&gt;"), 8U);
}

TEST(LabChart, WhatCannotBeMeasuredIsWrittenOverItsPlace) {
  Panel bars;
  bars.x = {"seqlen", ScaleKind::kBand, Unit::kPlain, {"512", "1024"}};
  bars.y = {"speed-up", ScaleKind::kLinear, Unit::kTimes};
  bars.bars.push_back({"fattn", 1, {2.5, kNotKnown}, {"2.53x", "out of memory"}});
  const std::string svg = to_svg({"t", "", {bars}});
  EXPECT_EQ(count(svg, "<rect class=\"c1\""), 2U);  // one, and the legend's
  EXPECT_EQ(count(svg, ">out of memory<"), 1U);
  EXPECT_EQ(count(svg, ">2.53x<"), 1U);
}

TEST(LabChart, NumbersAsPeopleWriteThem) {
  EXPECT_EQ(text_of(Unit::kTime, 1e-3), "1 ms");
  EXPECT_EQ(text_of(Unit::kTime, 0.9996e-3), "1 ms");
  EXPECT_EQ(text_of(Unit::kTime, 12.34e-6), "12.3 us");
  EXPECT_EQ(text_of(Unit::kTime, 75), "75 s");
  EXPECT_EQ(text_of(Unit::kBytes, 65536), "64 KiB");
  EXPECT_EQ(text_of(Unit::kBytes, 1023 * 1024), "1023 KiB");
  EXPECT_EQ(text_of(Unit::kBytes, 1.5 * 1024 * 1024 * 1024), "1.5 GiB");
  EXPECT_EQ(text_of(Unit::kPlain, 512), "512");
  EXPECT_EQ(text_of(Unit::kPlain, 131072), "131072");
  EXPECT_EQ(text_of(Unit::kPlain, 0.1 + 0.2), "0.3");
  EXPECT_EQ(text_of(Unit::kRate, 2.5e11), "250 G");
  EXPECT_EQ(text_of(Unit::kTimes, 4.5), "4.5x");
  EXPECT_EQ(text_of(Unit::kShare, 0.1416), "14.2 %");
  EXPECT_EQ(text_of(Unit::kTime, kNotKnown), "-");
  EXPECT_EQ(text_of(Unit::kTime, 0), "0");
}

std::vector<std::string> labels(ScaleKind kind, Unit unit, double low, double high, size_t most = 6) {
  Extent extent;
  extent.cover(low), extent.cover(high);
  std::vector<std::string> texts;
  for (const Tick& tick : Scale(kind, extent, true, 0, 100).ticks(unit, most)) texts.push_back(tick.label);
  return texts;
}

TEST(LabChart, TicksAreRoundNumbers) {
  using Texts = std::vector<std::string>;
  EXPECT_EQ(labels(ScaleKind::kLog2, Unit::kPlain, 512, 4096), (Texts{"512", "1024", "2048", "4096"}));
  EXPECT_EQ(labels(ScaleKind::kLog10, Unit::kTime, 1e-4, 2), (Texts{"100 us", "1 ms", "10 ms", "100 ms", "1 s"}));
  EXPECT_EQ(labels(ScaleKind::kLog10, Unit::kTime, 1e-3, 2e-2), (Texts{"1 ms", "2 ms", "5 ms", "10 ms", "20 ms"}));
  EXPECT_EQ(labels(ScaleKind::kLinear, Unit::kTimes, 0, 4), (Texts{"0x", "1x", "2x", "3x", "4x"}));
  EXPECT_EQ(labels(ScaleKind::kLinear, Unit::kBytes, 0, 1 << 20), (Texts{"0", "256 KiB", "512 KiB", "768 KiB", "1 MiB"}));
  for (const ScaleKind kind : {ScaleKind::kLinear, ScaleKind::kLog2, ScaleKind::kLog10})
    for (const auto& [low, high] : {std::pair{1.0, 1.0}, {1e-12, 1e12}, {3.0, 3.1}, {1023.0, 1025.0}, {1e15, 1.0001e15}})
      for (const size_t most : {2U, 4U, 9U}) {
        const Texts texts = labels(kind, Unit::kTime, low, high, most);
        EXPECT_GE(texts.size(), 1U);
        EXPECT_LE(texts.size(), most + 2) << low << " " << high;
      }
}

TEST(LabChart, EveryContestantHasALookOfItsOwn) {
  std::set<std::string> dashes;
  for (int i = 0; i < kLooks; ++i) dashes.insert(dashes_of(i));
  EXPECT_EQ(dashes.size(), static_cast<size_t>(kLooks));
  EXPECT_EQ(look_of(-1), kLooks - 1);
  EXPECT_EQ(look_of(kLooks + 2), 2);
}

TEST(LabChart, TextBreaksAtBlanksAndBetweenChineseCharacters) {
  EXPECT_EQ(lines_of_text("aaaa bbbb cccc", 10, 60), (std::vector<std::string>{"aaaa bbbb", "cccc"}));
  EXPECT_EQ(lines_of_text("序列長度的影響", 10, 35), (std::vector<std::string>{"序列長", "度的影", "響"}));
  EXPECT_EQ(cut_to_width("序列長度的影響", 10, 55), "序列長度...");
  EXPECT_EQ(cut_to_width("short", 10, 100), "short");
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

size_t columns_of(const std::string& text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U; }));
}

TEST(LabChart, ATerminalShowsLinesByMarks) {
  const Panel panel = seqlen_chart().panels[0];
  for (const size_t width : {40U, 60U, 80U, 200U}) {
    const std::string text = terminal_plot(panel, {width, 10, false});
    const std::vector<std::string> lines = lines_of(text);
    ASSERT_EQ(lines.size(), 14U) << text;
    for (const std::string& line : lines) EXPECT_LE(columns_of(line), width) << text;
    EXPECT_EQ(text.find('\x1b'), std::string::npos);
    EXPECT_EQ(lines[0], "  Forward: time");
    EXPECT_NE(text.find("10 ms"), std::string::npos);
    EXPECT_NE(lines.back().find("o standard   x fattn"), std::string::npos);
    std::string area;
    for (size_t i = 1; i <= 10; ++i) area += lines[i].substr(lines[i].find(' ', 8));
    EXPECT_EQ(std::count(area.begin(), area.end(), 'o'), 5) << text;
    EXPECT_EQ(std::count(area.begin(), area.end(), 'x'), 7) << text;
  }
  EXPECT_NE(terminal_plot(panel, {80, 10, true}).find("\x1b[36mo\x1b[0m"), std::string::npos);
}

TEST(LabChart, ATerminalShowsNothingOfNothing) {
  Panel panel;
  EXPECT_EQ(terminal_plot(panel, {}), "");
  panel.lines.push_back({"fattn", 0, {{1, kNotKnown}, {kNotKnown, 1}}});
  EXPECT_EQ(terminal_plot(panel, {}), "");
  panel.lines[0].points.push_back({1, 1});
  EXPECT_EQ(terminal_plot(panel, {10, 10, false}), "");  // no room
  EXPECT_NE(terminal_plot(panel, {}), "");
}

TEST(LabChart, CoordinatesAreShort) {
  EXPECT_EQ(coordinate(1.0 / 3), "0.33");
  EXPECT_EQ(coordinate(-0.001), "0");
  EXPECT_EQ(coordinate(10), "10");
  EXPECT_EQ(coordinate(kNotKnown), "0");
}

}  // namespace
}  // namespace fattn::lab::chart
