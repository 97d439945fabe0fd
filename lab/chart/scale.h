// From values to places on an axis: linear, logarithmic or a band for each category; and the ticks of each.
#pragma once

#include <limits>
#include <string>
#include <vector>

#include "lab/chart/quantity.h"

namespace fattn::lab::chart {

enum class ScaleKind { kLinear, kLog2, kLog10, kBand };

// The least and the greatest of what was seen.
struct Extent {
  double low = std::numeric_limits<double>::infinity(), high = -std::numeric_limits<double>::infinity();
  bool empty() const { return !(low <= high); }
  void cover(double value);  // leaves out what is no number
  // What a logarithmic scale has no place for does not count.
  void cover(double value, ScaleKind on) {
    const bool logarithmic = on == ScaleKind::kLog2 || on == ScaleKind::kLog10;
    if (!logarithmic || value > 0) cover(value);
  }
};

struct Tick {
  double value = 0;
  std::string label;
};

class Scale {
 public:
  // Covers `values` with some room around them; a linear one begins at 0 if `from_zero` and nothing is below. Nothing to cover: an axis from 1 to 10.
  Scale(ScaleKind kind, Extent values, bool from_zero, double begin, double end);
  // One band each.
  Scale(size_t categories, double begin, double end);

  bool logarithmic() const { return kind_ == ScaleKind::kLog2 || kind_ == ScaleKind::kLog10; }
  bool takes(double value) const;  // a number and, on a logarithmic scale, above 0
  double at(double value) const;   // of a band's number: its middle
  double band_width() const;
  double low() const { return low_; }
  double high() const { return high_; }
  double begin() const { return begin_; }
  double end() const { return end_; }

  // At most `most`, evenly chosen: of a linear scale multiples of 1, 2 or 5 times a power of ten (of bytes: powers of two), of a logarithmic one
  // powers, with those between them where there is room.
  std::vector<Tick> ticks(Unit unit, size_t most) const;

 private:
  double from(double value) const;  // the value as it is laid out: its logarithm on a logarithmic scale

  ScaleKind kind_;
  double low_, high_, begin_, end_;
};

}  // namespace fattn::lab::chart
