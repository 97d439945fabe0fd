// Figures as SVG: panels in a grid, each with lines, bands, marks, bars and references on linear, logarithmic or banded axes. No script is needed
// to read one; it follows the light or dark scheme of where it is shown, and looks differ in dashes and markers, not in colour alone.
//
//   Panel time{"Forward"};
//   time.x = {"seqlen", ScaleKind::kLog2};
//   time.y = {"time", ScaleKind::kLog10, Unit::kTime};
//   time.lines.push_back({"fattn", 0, {{512, 1.1e-3, 1.0e-3, 1.2e-3}, {1024, 4.2e-3}}});
//   const std::string svg = to_svg({"Time by seqlen", "What was measured and how.", {time}});
#pragma once

#include <limits>
#include <string>
#include <vector>

#include "lab/chart/quantity.h"
#include "lab/chart/scale.h"

namespace fattn::lab::chart {

inline constexpr double kNotKnown = std::numeric_limits<double>::quiet_NaN();

struct Axis {
  std::string title = {};
  ScaleKind scale = ScaleKind::kLinear;
  Unit unit = Unit::kPlain;
  std::vector<std::string> categories = {};               // of kBand, on the horizontal axis
  bool from_zero = true;                                  // of kLinear
  double covers_from = kNotKnown, covers_to = kNotKnown;  // more than the data
};

// A point that is no number (or not above 0 on a logarithmic axis) is left out, and a line is broken there.
struct Point {
  double x = 0, y = 0;
  double low = kNotKnown, high = kNotKnown;  // the band around y
};

// What was measured, or computed point by point. Its look is its colour, dashes and marker; the same contestant has the same look in all panels.
struct Line {
  std::string name = {};  // in the figure's legend
  int look = 0;
  std::vector<Point> points = {};
  bool connected = true;  // false: marks alone, as predictions against measurements
  bool marked = true;     // false: no markers, as the roof of a roofline
};

// Straight or a power law, and told by its label in the panel's own legend: a fit, a slope, a ceiling, "as fast as standard".
struct Reference {
  enum class Kind {
    kLevel,    // y = value, which the axis covers
    kUpright,  // x = value, which the axis covers
    kPower,    // y = value * x^exponent, where it is in the panel
  };
  Kind kind = Kind::kLevel;
  std::string label = {};
  double value = 1, exponent = 1;
  int look = -1;  // of the line that it was fitted to; -1: grey
};

// A bar in each category. What is no number has no bar, but its label all the same: why there is none.
struct Bars {
  std::string name = {};
  int look = 0;
  std::vector<double> values = {};
  std::vector<std::string> labels = {};  // empty: the values, by the axis's unit
};

struct Panel {
  std::string title = {};
  Axis x = {}, y = {};
  std::vector<Line> lines = {};
  std::vector<Bars> bars = {};
  std::vector<Reference> references = {};
  std::string note = {};                         // a line under it
  std::string nothing = "nothing was measured";  // what it says where it has nothing to show
};

struct Figure {
  std::string title = {}, description = {};  // the description is for screen readers; what each panel shows is added to it
  std::vector<Panel> panels = {};
  int columns = 2;
  std::string note = {};     // under all panels
  std::string id = "fattn";  // begins the ids inside, which must differ where several figures are in one page
  std::string language = "en";
};

// A panel is 440 wide, so that a figure of one column is readable on a phone; wider ones should be shown as several figures there.
inline constexpr double kPanelWidth = 440;

std::string to_svg(const Figure& figure);

}  // namespace fattn::lab::chart
