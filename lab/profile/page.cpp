// The page of a profile: the verdict first, then the tables and figures that it stands on.
#include <fmt/format.h>

#include <algorithm>

#include "lab/chart/quantity.h"
#include "lab/profile/profile.h"

namespace fattn::lab::profile {
namespace {

using chart::text_of;
using chart::Unit;
using report::Block;
using report::clean;
using report::kBold;
using report::kCode;
using report::PageTable;
using report::Section;

std::string bold(const std::string& text) { return kBold + clean(text) + kBold; }
std::string code(const std::string& text) { return kCode + clean(text) + kCode; }
std::string number_or(double value, Unit unit, const char* otherwise = "") { return value > 0 ? text_of(unit, value) : otherwise; }

std::string value_text(const Counter& c, double value) {
  if (c.unit == "B") return text_of(Unit::kBytes, value);
  if (c.unit == "B/s") return text_of(Unit::kBytes, value) + "/s";
  if (c.unit == "s") return text_of(Unit::kTime, value);
  if (c.unit == "share") return text_of(Unit::kShare, value);
  return value >= 1e6 ? fmt::format("{:.4g}", value) : fmt::format("{:.6g}", value);
}

Section summary(const Profile& p) {
  Section section{"summary", "What was found", {}};
  if (!p.interrupted.empty()) section.blocks.push_back(Block::paragraph(bold("Interrupted.") + " This page has " + clean(p.interrupted) + "."));
  std::vector<report::Card> cards;
  for (const char* pass : {"fwd", "bwd", "fwdbwd"}) {
    const double ours = seconds_of(p, "fattn", pass), standard = seconds_of(p, "standard", pass);
    if (ours > 0 && standard > 0)
      cards.push_back({standard >= ours, fmt::format("{:.2f}x", standard / ours), fmt::format("as fast as standard attention ({})", pass),
                       fmt::format("{} against {}", text_of(Unit::kTime, ours), text_of(Unit::kTime, standard))});
  }
  if (!cards.empty()) section.blocks.push_back(Block::of(std::move(cards)));
  std::vector<std::string> items;
  for (const Finding& finding : p.verdict) items.push_back(bold(finding.topic) + ": " + clean(finding.text));
  if (items.empty()) items.emplace_back("Nothing was measured.");
  section.blocks.push_back(Block::bullets(std::move(items)));
  return section;
}

Section times(const Profile& p) {
  Section section{"times", "Times, without a profiler beside", {}};
  if (p.rows.empty()) return section;
  PageTable table;
  table.caption = "Checked against the float64 oracle first, then timed in turns";
  table.heads = {"contestant", "pass", "median", "95 % interval", "FLOP/s", "of peak", "extra memory", "against standard"};
  table.numeric = {false, false, true, true, true, true, true, true};
  for (const measure::Row& row : p.rows) {
    if (!row.ok() || !row.time) {
      table.rows.push_back({clean(row.who.provider), name_of(row.pass), clean(std::string(name_of(row.status)) + ": " + row.reason)});
      continue;
    }
    table.rows.push_back({clean(row.who.provider), name_of(row.pass), text_of(Unit::kTime, row.time->median),
                          text_of(Unit::kTime, row.time->ci_low) + " - " + text_of(Unit::kTime, row.time->ci_high),
                          row.flops_per_s ? text_of(Unit::kRate, *row.flops_per_s) : "",
                          row.peak_fraction ? text_of(Unit::kShare, *row.peak_fraction) : "",
                          row.memory ? text_of(Unit::kBytes, static_cast<double>(row.memory->extra_bytes)) : "",
                          row.speedup_over_standard ? fmt::format("{:.2f}x", *row.speedup_over_standard) : ""});
  }
  section.blocks.push_back(Block::of(std::move(table)));
  return section;
}

PageTable operations_table(const Profile& p, const Side& side, const PassProfile& pass) {
  PageTable table;
  std::vector<Operation> operations = pass.operations;
  sort_operations(operations, p.sort);
  const size_t whole = operations.size();
  keep_first(operations, p.top);
  table.caption = fmt::format(
      "{}, {}: {} call{} recorded in {}{}", clean(side.name), pass.pass, pass.calls, pass.calls == 1 ? "" : "s", text_of(Unit::kTime, pass.seconds),
      operations.size() < whole ? fmt::format("; {} of {} operations: the first {}, and the library's calls", operations.size(), whole, p.top) : "");
  table.heads = {"operation", "kind", "shape, kernel or grid", "times", "self time", "share", "wall time", "FLOP", "bytes", "FLOP/s", "memory"};
  table.numeric = {false, false, false, true, true, true, true, true, true, true, true};
  for (const Operation& o : operations) {
    table.rows.push_back({clean(o.name), name_of(o.kind), clean(o.detail), std::to_string(o.times), text_of(Unit::kTime, o.self_seconds),
                          text_of(Unit::kShare, o.share), text_of(Unit::kTime, o.wall_seconds), number_or(o.flops, Unit::kRate),
                          number_or(o.bytes, Unit::kBytes), number_or(o.flops_per_s(), Unit::kRate), number_or(o.memory_bytes, Unit::kBytes)});
  }
  return table;
}

// The sides beside each other, of one call.
PageTable totals_table(const Profile& p) {
  PageTable table;
  table.caption = p.program ? "All operations together" : "All operations together, a call";
  table.heads = {"of", "pass", "recorded", "host's threads", "GPU", "FLOP", "bytes at least", "workspace", "against standard"};
  table.numeric = {false, false, true, true, true, true, true, true, true};
  for (const Side& side : p.sides)
    for (const PassProfile& pass : side.passes) {
      if (!pass.reason.empty()) continue;
      const Totals totals = totals_of(pass.operations);
      const double calls = p.program ? 1 : static_cast<double>(std::max<int64_t>(1, pass.calls));
      const double ours = seconds_of(p, side.name, pass.pass), standard = seconds_of(p, "standard", pass.pass);
      table.rows.push_back({clean(side.name), pass.pass, text_of(Unit::kTime, pass.seconds / calls),
                            text_of(Unit::kTime, totals.host_seconds / calls), number_or(totals.gpu_seconds / calls, Unit::kTime),
                            number_or(totals.flops / calls, Unit::kRate), number_or(totals.bytes / calls, Unit::kBytes),
                            number_or(totals.memory_bytes, Unit::kBytes), ours > 0 && standard > 0 ? fmt::format("{:.2f}x", standard / ours) : ""});
    }
  return table;
}

Section operations(const Profile& p) {
  Section section{"operations", "Operations", {}};
  section.blocks.push_back(
      Block::paragraph("Self time is that of all threads (or streams) together, without what lies inside of an operation; share is of the self time "
                       "on the same side, host "
                       "or GPU; wall time is while at least one was under way. " +
                       code("operations.csv") + " has all of them, to be sorted by any column."));
  section.blocks.push_back(Block::of(totals_table(p)));
  for (const Side& side : p.sides)
    for (const PassProfile& pass : side.passes)
      section.blocks.push_back(pass.reason.empty()
                                   ? Block::of(operations_table(p, side, pass))
                                   : Block::paragraph(bold(side.name + ", " + pass.pass) + ": nothing was recorded: " + clean(pass.reason)));
  return section;
}

Section counters(const Profile& p) {
  Section section{"counters", "Counters", {}};
  for (const Side& side : p.sides)
    for (const PassProfile& pass : side.passes) {
      if (pass.counters.empty()) continue;
      PageTable table;
      table.caption = fmt::format("{}, {}: of {}", clean(side.name), pass.pass, p.program ? "the whole program" : "a call");
      table.heads = {"counter", "what it is", "value", "model", "difference", "source"};
      table.numeric = {false, false, true, true, true, false};
      std::vector<std::pair<std::string, std::string>> reasons;  // and the counters that have them
      for (const Counter& c : pass.counters) {
        if (!c.value) {
          const auto known = std::find_if(reasons.begin(), reasons.end(), [&](const auto& r) { return r.first == c.reason; });
          if (known == reasons.end())
            reasons.emplace_back(c.reason, c.name);
          else
            known->second += ", " + c.name;
          continue;
        }
        table.rows.push_back({clean(c.name), clean(c.words), value_text(c, *c.value), c.model ? value_text(c, *c.model) : "",
                              c.difference() ? fmt::format("{:+.1f} %", 100 * *c.difference()) : "", clean(c.source)});
      }
      if (!table.rows.empty()) section.blocks.push_back(Block::of(std::move(table)));
      std::vector<std::string> refused;
      refused.reserve(reasons.size());
      for (const auto& [reason, names] : reasons) refused.push_back(clean(side.name + ", " + pass.pass + ": no number for " + names + ": " + reason));
      if (!refused.empty()) section.blocks.push_back(Block::bullets(std::move(refused)));
    }
  if (section.blocks.empty()) section.blocks.push_back(Block::paragraph("Nothing was counted."));
  return section;
}

chart::Panel memory_panel(const Profile& p, const Side& side) {
  chart::Panel panel;
  panel.title = side.name;
  panel.x = {"time", chart::ScaleKind::kLinear, Unit::kTime};
  panel.y = {"memory", chart::ScaleKind::kLinear, Unit::kBytes};
  const auto at = [&](int64_t ns) { return static_cast<double>(ns - p.begin_ns) * 1e-9; };
  chart::Line allocated{"allocated", 0, {}, true, false}, resident{"resident set", 1, {}, true, false};
  for (const MemoryChange& c : side.memory.changes) {  // steps
    if (!allocated.points.empty()) allocated.points.push_back({at(c.ns), allocated.points.back().y});
    allocated.points.push_back({at(c.ns), c.total});
  }
  const size_t every = std::max<size_t>(1, side.memory.samples.size() / 400);
  for (size_t i = 0; i < side.memory.samples.size(); i += every)
    resident.points.push_back({at(side.memory.samples[i].ns), side.memory.samples[i].bytes});
  if (!allocated.points.empty()) panel.lines.push_back(std::move(allocated));
  if (!resident.points.empty()) panel.lines.push_back(std::move(resident));
  return panel;
}

Section memory(const Profile& p) {
  Section section{"memory", "Memory over time", {}};
  chart::Figure figure;
  figure.title = "Memory over time";
  figure.description = "Allocated bytes and the resident set of the process by time.";
  PageTable table;
  table.caption = "Peaks";
  table.heads = {"of", "allocated", "resident set"};
  table.numeric = {false, true, true};
  for (const Side& side : p.sides) {
    figure.panels.push_back(memory_panel(p, side));
    table.rows.push_back(
        {clean(side.name), number_or(side.memory.peak_changes(), Unit::kBytes), number_or(side.memory.peak_samples(), Unit::kBytes)});
  }
  section.blocks.push_back(Block::of(std::move(table)));
  if (!figure.panels.empty()) section.blocks.push_back(Block::of(report::PageFigure{"memory", figure, "Memory over time"}));
  for (const Side& side : p.sides) {
    if (side.memory.changes.empty()) continue;
    PageTable events;
    events.caption = clean(side.name) + ": every allocation";
    events.heads = {"seconds", "what", "on", "bytes", "allocated then"};
    events.numeric = {true, false, false, true, true};
    for (size_t i = 0; i < std::min<size_t>(side.memory.changes.size(), 200); ++i) {
      const MemoryChange& c = side.memory.changes[i];
      events.rows.push_back({fmt::format("{:.6f}", static_cast<double>(c.ns - p.begin_ns) * 1e-9), clean(c.what),
                             c.device >= 0 ? fmt::format("cuda:{}", c.device) : "host",
                             (c.bytes < 0 ? "-" : "+") + text_of(Unit::kBytes, std::abs(c.bytes)), text_of(Unit::kBytes, c.total)});
    }
    section.blocks.push_back(Block::of(std::move(events), true));
  }
  return section;
}

Section rest(const Profile& p, const std::vector<std::pair<std::string, std::string>>& files) {
  Section section{"folder", "This folder", {}};
  std::vector<std::string> items;
  items.reserve(files.size());
  for (const auto& [file, words] : files) items.push_back(code(file) + ": " + clean(words));
  section.blocks.push_back(Block::bullets(std::move(items)));
  std::vector<std::string> tools;
  for (const Tool& tool : p.tools) tools.push_back(bold(tool.name) + ": " + clean(tool.words));
  for (const std::string& note : p.notes) tools.push_back(clean(note));
  if (!tools.empty()) section.blocks.push_back(Block::bullets(std::move(tools)));
  std::string line = "fattn profile";
  for (const std::string& flag : p.flags) line += " " + flag;
  section.blocks.push_back(Block::commands("Repeat it", {line}));
  return section;
}

}  // namespace

report::Page page_of(const Profile& p, const std::vector<std::pair<std::string, std::string>>& files) {
  report::Page page;
  page.language = "en";
  page.contents = "Contents";
  page.skip = "Skip to the contents";
  page.open_table = "as a table";
  std::string of = p.spec ? measure::describe(*p.spec) : "";
  if (p.program) {
    for (const std::string& word : p.program->command) of += (of.empty() ? "" : " ") + word;
    if (of.size() > 200) of = of.substr(0, 200) + " ...";
  }
  page.title = "Profile of " + clean(of);
  page.subtitle = clean(p.device + (p.device_name.empty() ? "" : ", " + p.device_name) +
                        (p.environment.contains("date") ? ", " + p.environment.value("date", "") : ""));
  page.sections.push_back(summary(p));
  if (!p.rows.empty()) page.sections.push_back(times(p));
  page.sections.push_back(operations(p));
  page.sections.push_back(counters(p));
  page.sections.push_back(memory(p));
  page.sections.push_back(rest(p, files));
  return page;
}

}  // namespace fattn::lab::profile
