#include "lab/sweep/figures.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>

namespace fattn::lab {
namespace {

using namespace chart;

std::string title_of(const std::string& pass) { return pass == "fwd" ? "Forward" : pass == "bwd" ? "Backward" : "Forward and backward"; }

std::vector<int64_t> sorted_values(const Sweep& sweep) {
  std::vector<int64_t> values = sweep.values;
  std::sort(values.begin(), values.end());
  return values;
}

// Powers of two apart, or so many of them that equal steps would hide the small ones.
chart::Axis horizontal(const Sweep& sweep) {
  const auto [least, most] = std::minmax_element(sweep.values.begin(), sweep.values.end());
  const bool wide = !sweep.values.empty() && *least > 0 && *most >= 4 * *least;
  chart::Axis axis;
  axis.title = name_of(sweep.axis);
  axis.scale = wide ? ScaleKind::kLog2 : ScaleKind::kLinear;
  axis.from_zero = false;
  return axis;
}

int look_of(const Sweep& sweep, const std::string& contestant) {
  return static_cast<int>(std::find(sweep.contestants.begin(), sweep.contestants.end(), contestant) - sweep.contestants.begin());
}

// A line for each contestant. `point` fills y and, if it has one, its band; what is not ok breaks the line.
std::vector<Line> lines_of(const Sweep& sweep, const std::string& pass, const std::function<void(const Cell&, Point&)>& point) {
  std::vector<Line> lines;
  for (const std::string& contestant : sweep.contestants) {
    Line line{contestant, look_of(sweep, contestant)};
    bool any = false;
    for (const int64_t value : sorted_values(sweep)) {
      Point p{static_cast<double>(value), kNotKnown};
      if (const Cell* cell = sweep.cell(value, contestant, pass); cell && cell->ok()) point(*cell, p);
      any = any || std::isfinite(p.y);
      line.points.push_back(p);
    }
    if (any) lines.push_back(std::move(line));
  }
  return lines;
}

double known(const std::optional<double>& value) { return value ? *value : kNotKnown; }

// "standard: out of memory from 8192" for what a panel cannot show.
std::string missing(const Sweep& sweep, const std::string& pass) {
  std::string text;
  for (const std::string& contestant : sweep.contestants)
    for (const auto& [status, words] :
         {std::pair{"out_of_memory", "out of memory"}, {"timeout", "would take too long"}, {"unsupported", "not supported"}}) {
      std::vector<int64_t> values;
      for (const int64_t value : sorted_values(sweep))
        if (const Cell* cell = sweep.cell(value, contestant, pass); cell && cell->status == status) values.push_back(value);
      if (values.empty()) continue;
      text += (text.empty() ? "" : "; ") + fmt::format("{}: {} at {}", contestant, words, fmt::join(values, ", "));
    }
  return text.empty() ? "" : text + ".";
}

Panel memory_panel(const Sweep& sweep, const std::string& pass) {
  Panel panel;
  panel.title = title_of(pass) + ": peak extra memory";
  panel.x = horizontal(sweep);
  panel.y = {"bytes over the inputs", panel.x.scale == ScaleKind::kLog2 ? ScaleKind::kLog2 : ScaleKind::kLinear, Unit::kBytes};
  panel.lines = lines_of(sweep, pass, [](const Cell& cell, Point& p) { p.y = known(cell.extra_bytes); });
  panel.note = missing(sweep, pass);
  return panel;
}

Panel rate_panel(const Sweep& sweep, const std::string& pass) {
  Panel panel;
  panel.title = title_of(pass) + ": FLOP/s";
  panel.x = horizontal(sweep);
  panel.y = {"FLOP/s", ScaleKind::kLinear, Unit::kRate};
  panel.lines = lines_of(sweep, pass, [](const Cell& cell, Point& p) {
    p.y = known(cell.flops_per_s);
    const double work = p.y * known(cell.seconds);
    p.low = work / known(cell.seconds_high);
    p.high = work / known(cell.seconds_low);
  });
  double ceiling = 0;
  std::string name;
  for (const Cell& cell : sweep.cells)
    if (cell.ok() && cell.peak_flops_per_s && *cell.peak_flops_per_s > ceiling) ceiling = *cell.peak_flops_per_s, name = cell.peak;
  if (ceiling > 0 && !panel.lines.empty())
    panel.references.push_back(
        {Reference::Kind::kLevel, fmt::format("ceiling measured here: {} ({}FLOP/s)", name, text_of(Unit::kRate, ceiling)), ceiling});
  return panel;
}

Panel tokens_panel(const Sweep& sweep, const std::string& pass) {
  Panel panel;
  panel.title = title_of(pass) + ": throughput";
  panel.x = horizontal(sweep);
  panel.y = {"tokens/s", ScaleKind::kLinear, Unit::kRate};
  panel.lines = lines_of(sweep, pass, [](const Cell& cell, Point& p) { p.y = known(cell.tokens_per_s); });
  return panel;
}

Panel speedup_panel(const Sweep& sweep, const std::string& pass) {
  Panel panel;
  panel.title = sweep.baseline.empty() ? title_of(pass) + ": speed-up" : title_of(pass) + ": speed-up over " + sweep.baseline;
  panel.nothing =
      sweep.baseline.empty() ? "standard was not measured, so there is no speed-up" : "nothing was measured together with " + sweep.baseline;
  panel.x = {name_of(sweep.axis), ScaleKind::kBand};
  panel.y = {"times as fast", ScaleKind::kLinear, Unit::kTimes};
  const std::vector<int64_t> values = sorted_values(sweep);
  for (const int64_t value : values) panel.x.categories.push_back(text_of_value(sweep.axis, value));
  for (const std::string& contestant : sweep.contestants) {
    if (contestant == sweep.baseline) continue;
    Bars bars{contestant, look_of(sweep, contestant)};
    bool any = false;
    for (const int64_t value : values) {
      const Cell *mine = sweep.cell(value, contestant, pass), *base = sweep.cell(value, sweep.baseline, pass);
      const bool both = mine && mine->ok() && mine->speedup;
      any = any || both;
      bars.values.push_back(both ? *mine->speedup : kNotKnown);
      const Cell* lacking = mine && !mine->ok() ? mine : base && !base->ok() ? base : nullptr;
      const bool out = lacking && lacking->status == "out_of_memory";
      bars.labels.push_back(both      ? text_of(Unit::kTimes, *mine->speedup) + (mine->undecided ? " ?" : "")
                            : lacking ? lacking->contestant + (out ? ": out of memory" : ": " + lacking->status)
                                      : "");
    }
    if (any) panel.bars.push_back(std::move(bars));
  }
  const bool open = std::any_of(sweep.cells.begin(), sweep.cells.end(), [&](const Cell& c) { return c.pass == pass && c.ok() && c.undecided; });
  if (open && !panel.bars.empty()) panel.note = "?: the intervals overlap, so neither is called faster.";
  if (!panel.bars.empty()) panel.references.push_back({Reference::Kind::kLevel, "as fast as " + sweep.baseline, 1});
  return panel;
}

Panel growth_panel(const Sweep& sweep, const std::string& pass) {
  Panel panel = time_panel(sweep, pass);
  panel.title = title_of(pass) + ": how time grows with seqlen";
  panel.x.scale = ScaleKind::kLog2;
  panel.y.scale = ScaleKind::kLog10;
  panel.note.clear();
  for (Line& line : panel.lines) {
    line.connected = false;
    for (Point& point : line.points) point.low = point.high = kNotKnown;
  }
  const double exponent = expected_exponent(sweep);
  // A little below the last point of the first line: beside the measurements.
  constexpr double kBelow = 0.4;
  for (const Line& line : panel.lines) {
    const auto last = std::find_if(line.points.rbegin(), line.points.rend(), [](const Point& p) { return std::isfinite(p.y) && p.x > 0; });
    if (last == line.points.rend()) continue;
    panel.references.push_back({Reference::Kind::kPower,
                                exponent == 2 ? "slope 2: seqlen^2, as the operations" : "slope 1: seqlen, as the operations",
                                kBelow * last->y / std::pow(last->x, exponent), exponent});
    break;
  }
  for (const Growth& one : growth_of(sweep))
    if (one.pass == pass && one.law)
      panel.references.push_back(
          {Reference::Kind::kPower,
           fmt::format("{}: seqlen^{:.2f} (95 %: {:.2f} to {:.2f})", one.contestant, one.law->exponent, one.law->low, one.law->high), one.law->factor,
           one.law->exponent, look_of(sweep, one.contestant)});
    else if (one.pass == pass && std::any_of(panel.lines.begin(), panel.lines.end(), [&](const Line& line) { return line.name == one.contestant; }))
      panel.note += (panel.note.empty() ? "" : " ") + fmt::format("{}: no exponent, {}.", one.contestant, one.reason);
  return panel;
}

// Of a sweep over no more than the mask: bars of all passes.
std::vector<Panel> summary_panels(const Sweep& sweep) {
  Panel speed, share;
  speed.title = "Speed-up over " + sweep.baseline;
  share.title = "Extra memory, as a share of " + sweep.baseline + "'s";
  speed.nothing = share.nothing = "nothing was measured together with " + (sweep.baseline.empty() ? "a baseline" : sweep.baseline);
  speed.x = share.x = {"pass", ScaleKind::kBand};
  speed.y = {"times as fast", ScaleKind::kLinear, Unit::kTimes};
  share.y = {"share", ScaleKind::kLinear, Unit::kShare};
  for (const std::string& pass : sweep.passes)
    for (const int64_t value : sweep.values) {
      const std::string label = pass + (value == 1 ? ", causal" : "");
      speed.x.categories.push_back(label), share.x.categories.push_back(label);
    }
  for (const std::string& contestant : sweep.contestants) {
    if (contestant == sweep.baseline) continue;
    Bars faster{contestant, look_of(sweep, contestant)}, less = faster;
    for (const std::string& pass : sweep.passes)
      for (const int64_t value : sweep.values) {
        const Cell* cell = sweep.cell(value, contestant, pass);
        faster.values.push_back(cell ? known(cell->speedup) : kNotKnown);
        less.values.push_back(cell ? known(cell->memory_share) : kNotKnown);
      }
    speed.bars.push_back(faster), share.bars.push_back(less);
  }
  speed.references.push_back({Reference::Kind::kLevel, "as fast as " + sweep.baseline, 1});
  return {speed, share};
}

}  // namespace

Panel time_panel(const Sweep& sweep, const std::string& pass) {
  Panel panel;
  panel.title = title_of(pass) + ": time";
  panel.x = horizontal(sweep);
  panel.y = {"median time of a call, with its 95 % interval", panel.x.scale == ScaleKind::kLog2 ? ScaleKind::kLog10 : ScaleKind::kLinear,
             Unit::kTime};
  panel.lines = lines_of(sweep, pass, [](const Cell& cell, Point& p) {
    p.y = known(cell.seconds);
    p.low = known(cell.seconds_low);
    p.high = known(cell.seconds_high);
  });
  panel.note = missing(sweep, pass);
  return panel;
}

std::vector<Panel> panels_of(const Sweep& sweep, const std::string& pass) {
  switch (sweep.axis) {
    case SweepAxis::kCausal: return summary_panels(sweep);
    case SweepAxis::kSeqlen:
      return {time_panel(sweep, pass), memory_panel(sweep, pass), speedup_panel(sweep, pass), growth_panel(sweep, pass), rate_panel(sweep, pass)};
    case SweepAxis::kBatch: return {time_panel(sweep, pass), memory_panel(sweep, pass), tokens_panel(sweep, pass)};
    default: return {time_panel(sweep, pass), rate_panel(sweep, pass), memory_panel(sweep, pass)};
  }
}

Figure figure_of(const Sweep& sweep, const std::vector<std::string>& passes) {
  Figure figure;
  figure.title = fmt::format("Attention by {}: {}, on {}", name_of(sweep.axis), sweep.problem, sweep.device);
  figure.description = fmt::format("A sweep over {} of {}, contestants {}.", name_of(sweep.axis), sweep.problem, fmt::join(sweep.contestants, ", "));
  figure.id = fmt::format("sweep-{}", name_of(sweep.axis));
  for (const std::string& pass : passes) {
    const std::vector<Panel> panels = panels_of(sweep, pass);
    figure.columns = static_cast<int>(passes.size() == 1 && panels.size() > 3 ? 2 : panels.size());
    figure.panels.insert(figure.panels.end(), panels.begin(), panels.end());
    if (passes.size() == 1) figure.id += "-" + pass;
    if (sweep.axis == SweepAxis::kCausal) break;
  }
  figure.note = "Medians of checked results; bands and intervals are of 95 %. Memory is what a call adds to its inputs.";
  if (!sweep.complete) figure.note += " The sweep is not complete.";
  return figure;
}

}  // namespace fattn::lab
