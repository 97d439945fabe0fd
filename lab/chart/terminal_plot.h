// A panel's lines as text: dots of Braille between marks, for a terminal that shows Unicode.
#pragma once

#include <cstddef>
#include <string>

#include "lab/chart/chart.h"

namespace fattn::lab::chart {

struct TerminalPlot {
  size_t width = 80;   // columns in all
  size_t height = 10;  // rows of the plot area
  bool colour = false;
};

// Title, plot, labels of the axes and what each mark stands for; a newline ends every line. Of panels without a line to show: nothing.
// Every contestant has a mark of its own, so that colours only help.
std::string terminal_plot(const Panel& panel, const TerminalPlot& how);

}  // namespace fattn::lab::chart
