// What tells contestants apart: colours for light and dark that colour-blind readers can tell, dashes, markers.
#pragma once

#include <string>

#include "lab/chart/svg.h"

namespace fattn::lab::chart {

inline constexpr int kLooks = 8;

int look_of(int look);               // one of them for every number
std::string colour_class(int look);  // "c3"; -1: "cr", a reference's
std::string dashes_of(int look);     // of stroke-dasharray; empty: none

// A marker around a place, and what it says of itself.
void draw_marker(Svg& svg, int look, Place place, const std::string& title);

// One sheet for all figures, so that several in a page agree.
std::string style_sheet();

}  // namespace fattn::lab::chart
