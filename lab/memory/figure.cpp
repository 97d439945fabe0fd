// Rooflines and bars of a memory report.
#include <fmt/format.h>

#include <algorithm>

#include "lab/memory/report.h"

namespace fattn::lab {
namespace {

using chart::Panel;
using chart::ScaleKind;
using chart::Unit;
using measure::Pass;

constexpr const char* kAll[] = {"standard", "v1", "v2", "v3"};

int look_of_algorithm(const std::string& name) { return static_cast<int>(std::find(std::begin(kAll), std::end(kAll), name) - std::begin(kAll)); }

std::string words(Pass pass) { return pass == Pass::kForward ? "Forward" : "Backward"; }

Panel roofline(const MemoryReport& r, const PassTraffic& p, bool dram) {
  const MemoryMachine& m = r.machine;
  const double peak = m.flops_per_s(r.spec.dtype), rate = dram ? m.dram_bytes_per_s : m.cache_bytes_per_s, ridge = peak / rate;
  Panel panel;
  panel.title = fmt::format("{}: {}", words(p.pass), dram ? m.cache + " to DRAM" : m.chip + " to " + m.cache);
  panel.x = {"FLOP a byte", ScaleKind::kLog2};
  panel.y = {"FLOP/s", ScaleKind::kLog10, Unit::kRate};
  double low = ridge / 8, high = ridge * 8;
  for (const Traffic& t : p.algorithms) {
    const double x = dram ? t.dram_intensity() : t.intensity();
    if (x <= 0) continue;
    low = std::min(low, x / 2), high = std::max(high, x * 2);
    panel.lines.push_back({t.algorithm, look_of_algorithm(t.algorithm), {{x, std::min(peak, x * rate)}}, false});
  }
  chart::Line roof;
  roof.name = "roof", roof.look = 7, roof.marked = false;
  roof.points = {{low, low * rate}, {ridge, peak}, {high, peak}};
  panel.lines.push_back(roof);
  panel.note = fmt::format("The roof: {}FLOP/s and {}B/s measured; it bends at {:.3g} FLOP a byte.", chart::text_of(Unit::kRate, peak),
                           chart::text_of(Unit::kRate, rate), ridge);
  return panel;
}

}  // namespace

std::vector<Panel> rooflines(const MemoryReport& r) {
  std::vector<Panel> panels;
  for (const PassTraffic& p : r.passes)
    for (const bool dram : {false, true}) {
      const bool known = r.machine.flops_per_s(r.spec.dtype) > 0 && (dram ? r.machine.dram_bytes_per_s : r.machine.cache_bytes_per_s) > 0;
      if (known) panels.push_back(roofline(r, p, dram));
    }
  return panels;
}

std::vector<Panel> traffic_bars(const MemoryReport& r) {
  std::vector<Panel> panels;
  for (const PassTraffic& p : r.passes) {
    Panel panel;
    panel.title = words(p.pass) + ": bytes moved";
    panel.x.scale = ScaleKind::kBand;
    panel.y = {"bytes", ScaleKind::kLog2, Unit::kBytes};
    double most = 0;
    chart::Bars papers{"the papers' count", 4}, moved{r.machine.chip + " to " + r.machine.cache, 5}, dram{r.machine.cache + " to DRAM", 6};
    for (const Traffic& t : p.algorithms) {
      if (!t.reason.empty()) continue;
      panel.x.categories.push_back(t.algorithm);
      papers.values.push_back(t.papers_bytes);
      moved.values.push_back(t.moved_bytes);
      dram.values.push_back(t.dram_bytes);
      most = std::max({most, t.papers_bytes, t.moved_bytes});
    }
    panel.y.covers_from = p.compulsory_bytes / 4;
    panel.y.covers_to = most * 8;  // room for the labels of the bars
    panel.bars = {papers, moved, dram};
    panel.references.push_back({chart::Reference::Kind::kLevel, "every input and output once", p.compulsory_bytes});
    panels.push_back(panel);
  }
  return panels;
}

chart::Figure memory_figure(const MemoryReport& r) {
  chart::Figure figure;
  figure.title = "What attention moves: " + measure::describe(r.spec);
  figure.description = fmt::format("Counted from the algorithms' loops on {}; rates as measured by fattn calibrate.", r.machine.name);
  figure.panels = traffic_bars(r);
  if (r.passes.size() == 1) figure.columns = figure.panels.size() == 1 && rooflines(r).empty() ? 1 : 2;
  for (Panel& panel : rooflines(r)) figure.panels.push_back(std::move(panel));
  figure.note = r.machine.lacks.empty() ? "" : "No rooflines: this machine has no calibration.";
  figure.id = "memory";
  return figure;
}

}  // namespace fattn::lab
