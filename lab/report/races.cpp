// Who raced whom: beside standard attention with figures, then beside everybody as a table.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>

#include "lab/report/sections.h"

namespace fattn::lab::report {
namespace {

constexpr size_t kMostFigures = 4;
constexpr std::array kPasses = {"fwd", "bwd", "fwdbwd"};

// A problem that standard attention and others computed in one run.
struct Race {
  const MeasuredRecord* record = nullptr;
  std::string device, problem;
  std::vector<const RowOfRecord*> rows;
  std::vector<std::string> contestants;  // standard last
  double flops = 0;

  const RowOfRecord* row(const std::string& pass, const std::string& contestant) const {
    for (const RowOfRecord* r : rows)
      if (r->pass == pass && name_of(*record, *r) == contestant) return r;
    return nullptr;
  }
  // The library's own comes before a provider's.
  std::string standard() const {
    std::string found;
    for (const RowOfRecord* r : rows)
      if (is_standard(*r) && r->ok() && (found.empty() || r->provider == "standard")) found = name_of(*record, *r);
    return found;
  }
  bool has(const std::string& pass) const {
    const RowOfRecord* base = row(pass, standard());
    return base && base->ok();
  }
};

std::vector<Race> races_of(const Material& m) {
  std::vector<Race> all;
  for (const MeasuredRecord& record : m.records) {
    std::map<std::string, Race> problems;
    for (const RowOfRecord& row : record.rows) {
      Race& race = problems[row.problem() + "\n" + row.device];
      race.record = &record;
      race.problem = row.problem();
      race.rows.push_back(&row);
      if (row.ours && race.device.empty()) race.device = device_of(record, row);
      race.flops = std::max(race.flops, row.batch * row.nheads * row.seqlen_q * row.seqlen_k * row.headdim);
      const std::string name = name_of(record, row);
      if (row.status != "unavailable" && std::find(race.contestants.begin(), race.contestants.end(), name) == race.contestants.end())
        race.contestants.push_back(name);
    }
    for (auto& [key, race] : problems) {
      const std::string standard = race.standard();
      if (standard.empty() || race.device.empty() || race.contestants.size() < 2) continue;
      std::stable_partition(race.contestants.begin(), race.contestants.end(), [&](const std::string& name) { return name != standard; });
      all.push_back(std::move(race));
    }
  }
  std::stable_sort(all.begin(), all.end(), [](const Race& a, const Race& b) {
    return std::make_pair(a.contestants.size(), a.flops) > std::make_pair(b.contestants.size(), b.flops);
  });
  return all;
}

PageFigure figure_of(const Words& words, const Race& race) {
  const std::string standard = race.standard();
  std::vector<std::string> passes;
  chart::Panel speed, memory;
  for (const char* pass : kPasses)
    if (race.has(pass)) {
      passes.emplace_back(pass);
      speed.x.categories.push_back(words.pass(pass));
      memory.x.categories.push_back(words.pass(pass));
    }
  speed.title = words(Text::kSpeedPanel), memory.title = words(Text::kMemoryPanel);
  speed.x.scale = memory.x.scale = chart::ScaleKind::kBand;
  speed.y = {words(Text::kSpeedAxis), chart::ScaleKind::kLinear, chart::Unit::kTimes};
  memory.y = {words(Text::kMemoryAxis), chart::ScaleKind::kLinear, chart::Unit::kShare};
  for (const std::string& name : race.contestants) {
    chart::Bars times{words.contestant(name), look_for(name, race.contestants)}, share = times;
    for (const std::string& pass : passes) {
      const RowOfRecord *row = race.row(pass, name), *base = race.row(pass, standard);
      const bool ok = row && row->ok();
      times.values.push_back(ok ? base->time->median / row->time->median : chart::kNotKnown);
      times.labels.push_back(ok ? speed_text(*row, *base) : row ? row->status : "-");
      const bool bytes = ok && memory_of(*row) && memory_of(*base);
      share.values.push_back(bytes ? *row->extra_bytes / *base->extra_bytes : chart::kNotKnown);
      share.labels.push_back(bytes ? share_text(share.values.back()) : "-");
    }
    speed.bars.push_back(std::move(times));
    memory.bars.push_back(std::move(share));
  }
  PageFigure figure;
  figure.name = file_name("beside-standard " + race.device + " " + race.problem);
  figure.caption = words(Text::kRaceFigure, {words.device(race.device), clean(race.problem)});
  figure.chart.title = figure.caption;
  figure.chart.description = words(Text::kRaceDescription, {words.contestant(standard), words.device(race.device), clean(race.problem)});
  figure.chart.panels = {speed, memory};
  for (const chart::Bars& bars : speed.bars)
    if (std::any_of(bars.labels.begin(), bars.labels.end(), [](const std::string& label) { return label.find('?') != std::string::npos; }))
      figure.chart.note = words(Text::kOverlapNote);
  return figure;
}

PageTable table_of(const Words& words, const Race& race) {
  PageTable table;
  table.caption = words(Text::kSeqlenTable, {words.device(race.device), clean(race.problem)});
  table.heads = {words(Text::kHeadContestant), words(Text::kHeadPass), words(Text::kHeadTime),  words(Text::kHeadInterval),
                 words(Text::kHeadRate),       words(Text::kHeadPeak), words(Text::kHeadTimes), words(Text::kHeadExtra)};
  table.numeric = {false, false, true, true, true, true, true, true};
  const std::string standard = race.standard();
  for (const char* pass : kPasses)
    for (const std::string& name : race.contestants) {
      const RowOfRecord *row = race.row(pass, name), *base = race.row(pass, standard);
      if (!row) continue;
      if (!row->ok()) {
        table.rows.push_back({words.contestant(name), words.pass(pass), clean(row->status)});
        continue;
      }
      table.rows.push_back({words.contestant(name), words.pass(pass), seconds_text(row->time->median), seconds_range(row->time->low, row->time->high),
                            row->flops_per_s ? rate_text(*row->flops_per_s) : "", row->peak_fraction ? share_text(*row->peak_fraction) : "",
                            base && base->ok() && base != row ? speed_text(*row, *base) : "", row->extra_bytes ? bytes_text(*row->extra_bytes) : ""});
    }
  return table;
}

}  // namespace

Section beside_standard(const Material& m) {
  const Words& words = m.words;
  Section section{"standard", words(Text::kBesideStandard), {}};
  std::map<std::string, size_t> drawn;  // by device
  size_t figures = 0;
  for (const Race& race : races_of(m)) {
    if (figures >= kMostFigures || drawn[race.device]++ >= 2) continue;
    ++figures;
    if (section.blocks.empty()) {
      const bool algorithms =
          std::any_of(m.versus.begin(), m.versus.end(), [](const Versus& v) { return v.ours == "fattn" && v.duels[0].ours->provider != "fattn"; });
      section.blocks.push_back(
          Block::paragraph(algorithms ? words.then(words(Text::kBesideStandardText), words(Text::kBestStands)) : words(Text::kBesideStandardText)));
    }
    section.blocks.push_back(Block::of(figure_of(words, race)));
    section.blocks.push_back(Block::of(table_of(words, race), true));
    section.blocks.push_back(repeating(words, {race.record}));
  }
  return section;
}

namespace {

// Means of a device, a panel for each dtype.
std::vector<PageFigure> versus_figures(const Material& m) {
  const Words& words = m.words;
  std::map<std::string, PageFigure> by_device;
  std::vector<std::string> devices;
  for (const Versus& v : m.versus) {
    if (v.ours != "fattn" || v.duels.size() < 3) continue;
    PageFigure& figure = by_device[v.device];
    if (figure.name.empty()) {
      devices.push_back(v.device);
      figure.name = file_name("beside-others " + v.device);
      figure.caption = words(Text::kVersusFigure, {words.device(v.device), words(Text::kMean)});
      figure.chart.title = figure.caption;
    }
    auto panel = std::find_if(figure.chart.panels.begin(), figure.chart.panels.end(), [&](const chart::Panel& p) { return p.title == v.dtype; });
    if (panel == figure.chart.panels.end()) {
      figure.chart.panels.emplace_back();
      panel = figure.chart.panels.end() - 1;
      panel->title = v.dtype;
      panel->x.scale = chart::ScaleKind::kBand;
      panel->y = {words(Text::kSpeedAxis), chart::ScaleKind::kLinear, chart::Unit::kTimes};
      panel->references.push_back({chart::Reference::Kind::kLevel, "1×", 1});
    }
    const std::string pass = words.pass(v.pass);
    if (std::find(panel->x.categories.begin(), panel->x.categories.end(), pass) == panel->x.categories.end()) panel->x.categories.push_back(pass);
  }
  for (const std::string& device : devices)
    for (chart::Panel& panel : by_device[device].chart.panels) {
      std::vector<std::string> others;
      for (const Versus& v : m.versus)
        if (v.device == device && v.dtype == panel.title && v.ours == "fattn" && v.duels.size() >= 3 &&
            std::find(others.begin(), others.end(), v.other) == others.end())
          others.push_back(v.other);
      for (const std::string& other : others) {
        chart::Bars bars{words.contestant(other), look_for(other, others)};
        for (const std::string& category : panel.x.categories) {
          const auto found = std::find_if(m.versus.begin(), m.versus.end(), [&](const Versus& v) {
            return v.device == device && v.dtype == panel.title && v.ours == "fattn" && v.other == other && words.pass(v.pass) == category &&
                   v.duels.size() >= 3;
          });
          bars.values.push_back(found == m.versus.end() ? chart::kNotKnown : found->mean);
          bars.labels.push_back(found == m.versus.end() ? "-" : times_text(found->mean));
        }
        panel.bars.push_back(std::move(bars));
      }
    }
  std::vector<PageFigure> figures;
  for (const std::string& device : devices) figures.push_back(by_device[device]);
  return figures;
}

}  // namespace

Section beside_others(const Material& m) {
  const Words& words = m.words;
  Section section{"others", words(Text::kVersus), {}};
  if (m.versus.empty()) return section;
  for (PageFigure& figure : versus_figures(m)) section.blocks.push_back(Block::of(std::move(figure)));
  PageTable table;
  table.caption = words(Text::kVersusTable);
  for (const Text head : {Text::kHeadDevice, Text::kHeadOther, Text::kHeadDtype, Text::kHeadPass, Text::kHeadProblems, Text::kMean, Text::kLeast,
                          Text::kMost, Text::kHeadDecided, Text::kHeadMemory})
    table.heads.push_back(words(head));
  table.numeric = {false, false, false, false, true, true, true, true, true, true};
  std::vector<const MeasuredRecord*> records;
  for (const Versus& v : m.versus) {
    const std::string other = words.contestant(v.other);
    table.rows.push_back({words.device(v.device), v.ours == "fattn" ? other : clean(v.ours) + " : " + other, clean(v.dtype), words.pass(v.pass),
                          count_text(static_cast<double>(v.duels.size())),
                          fmt::format("{} ({} – {})", times_text(v.mean), times_text(v.low), times_text(v.high)), times_text(v.least->ratio),
                          times_text(v.most->ratio), fmt::format("{} / {} / {}", v.faster, v.slower, v.undecided),
                          v.memory ? share_text(*v.memory) : ""});
    for (const Duel& duel : v.duels)
      if (std::find(records.begin(), records.end(), duel.record) == records.end()) records.push_back(duel.record);
  }
  section.blocks.push_back(Block::of(std::move(table)));
  section.blocks.push_back(Block::paragraph(words(Text::kVersusNote)));
  section.blocks.push_back(repeating(words, records));
  return section;
}

}  // namespace fattn::lab::report
