// One panel: its size, then its drawing at a place.
#pragma once

#include "lab/chart/chart.h"
#include "lab/chart/svg.h"

namespace fattn::lab::chart {

// How high it is above its plot area, which depends on its title and its legend. Neighbours in a row take the largest.
double head_of(const Panel& panel);
inline constexpr double kPlotHeight = 210;
double foot_of(const Panel& panel);  // under the plot area

void draw_panel(Svg& svg, const Panel& panel, Place corner, double head);

// What it shows, for who cannot see it.
std::string words_of(const Panel& panel);

}  // namespace fattn::lab::chart
