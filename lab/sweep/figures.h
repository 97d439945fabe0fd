// The figures of a sweep: panels of one pass, whole figures, and the plot for a terminal.
#pragma once

#include <string>
#include <vector>

#include "lab/chart/chart.h"
#include "lab/sweep/sweep.h"

namespace fattn::lab {

// Of seqlen: time, memory, speed-up, growth, FLOP/s; of batch: time, memory, tokens/s; of others: time, FLOP/s, memory. Of causal: speed-up and
// memory share of all passes, so once, whichever pass is asked for.
std::vector<chart::Panel> panels_of(const Sweep& sweep, const std::string& pass);

// One pass as a grid; several as a row of panels each.
chart::Figure figure_of(const Sweep& sweep, const std::vector<std::string>& passes);

// Time against what is swept.
chart::Panel time_panel(const Sweep& sweep, const std::string& pass);

}  // namespace fattn::lab
