// What depends on the sequence length: time, rate, memory, and the exponent that times grow with.
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "lab/power_law.h"
#include "lab/report/sections.h"

namespace fattn::lab::report {
namespace {

constexpr size_t kMostCurves = 8, kMostOfADtype = 1, kMostContestants = 6;

std::string axis_of(const Words& words, const Family& f) {
  for (const auto& [over, text] : {std::pair{"seqlen", Text::kSeqlenAxis},
                                   {"seqlen-k", Text::kSeqlenKAxis},
                                   {"batch", Text::kBatchAxis},
                                   {"nheads", Text::kHeadsAxis},
                                   {"headdim", Text::kHeaddimAxis},
                                   {"embed", Text::kEmbedAxis},
                                   {"threads", Text::kThreadsAxis}})
    if (f.over == over) return words(text);
  return clean(f.over);
}

std::string words_of(const Words& words, const Family& f) {
  const std::string heads = f.nheads == f.nheads_k ? count_text(f.nheads) : count_text(f.nheads) + "/" + count_text(f.nheads_k);
  std::vector<std::string> parts;
  const bool heads_vary = f.over == "nheads" || f.over == "embed";
  if (f.constant_tokens)
    parts.push_back(words(Text::kPartTokens, {count_text(f.size)}));
  else if (f.over != "batch")
    parts.push_back(words(Text::kPartBatch, {count_text(f.size)}));
  if (f.over != "seqlen") parts.push_back(words(Text::kPartSeqlen, {count_text(f.seqlen)}));
  if (f.over != "nheads") parts.push_back(words(Text::kPartHeads, {heads}));
  if (f.over != "headdim" && !heads_vary) parts.push_back(words(Text::kPartHeaddim, {count_text(f.headdim)}));
  parts.push_back(clean(f.dtype));
  if (f.causal) parts.push_back(words(Text::kPartCausal));
  return words.list(parts);
}

std::string ours_of(const Family& f) {
  for (const char* name : {"fattn", "v3", "v2", "v1"})
    if (std::find(f.contestants.begin(), f.contestants.end(), name) != f.contestants.end()) return name;
  for (const std::string& name : f.contestants)
    if (name.rfind("fattn", 0) == 0) return name;
  return "";
}

std::string standard_of(const Family& f) {
  for (const std::string& name : f.contestants)
    if (name == "standard") return name;
  for (const std::string& name : f.contestants)
    if (name.rfind("torch-standard", 0) == 0) return name;
  return "";
}

// Those that are drawn: the library's, standard attention, then the others in their order.
std::vector<std::string> drawn_of(const Family& f) {
  std::vector<std::string> names;
  const auto add = [&](const std::string& name) {
    if (!name.empty() && names.size() < kMostContestants && std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  };
  add(ours_of(f));
  add(standard_of(f));
  for (const std::string& name : f.contestants) add(name);
  return names;
}

template <typename Value>
chart::Panel panel_of(const Words& words, const Family& f, const std::string& pass, const std::string& title, const chart::Axis& y,
                      const Value& value) {
  chart::Panel panel{title};
  panel.x = {axis_of(words, f), chart::ScaleKind::kLog2};
  panel.y = y;
  const std::vector<std::string> names = drawn_of(f);
  for (const std::string& name : names) {
    chart::Line line{words.contestant(name), look_for(name, names)};
    for (const double n : f.values) {
      const RowOfRecord* row = f.row(pass, name, n);
      chart::Point point{n, chart::kNotKnown};
      if (row && row->ok()) point = value(*row, n);
      line.points.push_back(point);
    }
    if (std::any_of(line.points.begin(), line.points.end(), [](const chart::Point& p) { return p.y > 0; })) panel.lines.push_back(std::move(line));
  }
  return panel;
}

chart::Point time_of(const RowOfRecord& row, double n) { return {n, row.time->median, row.time->low, row.time->high}; }

std::vector<std::pair<double, double>> points_of(const Family& f, const std::string& pass, const std::string& name) {
  std::vector<std::pair<double, double>> points;
  for (const double n : f.values)
    if (const RowOfRecord* row = f.row(pass, name, n); row && row->ok()) points.emplace_back(n, row->time->median);
  return points;
}

// Speed over standard attention as bars, a category for each length.
chart::Panel speedup_panel(const Words& words, const Family& f, const std::string& pass, const std::string& standard) {
  chart::Panel panel{words(Text::kSpeedupPanel, {words.contestant(standard), words.pass(pass)})};
  panel.x.title = axis_of(words, f);
  panel.x.scale = chart::ScaleKind::kBand;
  panel.y = {words(Text::kSpeedAxis), chart::ScaleKind::kLinear, chart::Unit::kTimes};
  panel.references.push_back({chart::Reference::Kind::kLevel, words.contestant(standard), 1});
  for (const double n : f.values) panel.x.categories.push_back(count_text(n));
  const std::string ours = ours_of(f);
  const std::vector<std::string> names = drawn_of(f);
  for (const std::string& name : names) {
    if (name != ours) continue;
    chart::Bars bars{words.contestant(name), look_for(name, names)};
    for (const double n : f.values) {
      const RowOfRecord *row = f.row(pass, name, n), *base = f.row(pass, standard, n);
      const bool both = row && row->ok() && base && base->ok();
      bars.values.push_back(both ? base->time->median / row->time->median : chart::kNotKnown);
      bars.labels.push_back(both ? speed_text(*row, *base) : base && !base->ok() ? base->status : "-");
    }
    panel.bars.push_back(std::move(bars));
  }
  return panel;
}

PageFigure figure_of(const Words& words, const Family& f) {
  PageFigure figure;
  const std::string family = words_of(words, f), standard = standard_of(f), ours = ours_of(f);
  figure.caption = words(Text::kSeqlenFigure, {axis_of(words, f), words.device(f.device), family});
  figure.name = file_name(fmt::format("{} {} {} {}{:.0f} h{:.0f} d{:.0f}{}", f.over, f.device, f.dtype, f.constant_tokens ? "tokens" : "b", f.size,
                                      f.nheads, f.headdim, f.causal ? " causal" : ""));
  chart::Figure& chart = figure.chart;
  chart.title = figure.caption;
  chart.description = words(Text::kSeqlenDescription, {words.device(f.device), family});
  chart.note = words(Text::kBandNote);
  if (!standard.empty() && !f.constant_tokens) chart.note = words.then(chart.note, words(Text::kOverlapNote));
  if (std::any_of(f.rows.begin(), f.rows.end(), [](const auto& row) { return row.second->extra_bytes_method == "resident set"; }))
    chart.note = words.then(chart.note, words(Text::kResident));
  const chart::Axis time{words(Text::kTimeAxis), chart::ScaleKind::kLog10, chart::Unit::kTime};
  chart::Axis rate{words(Text::kRateAxis), chart::ScaleKind::kLinear, chart::Unit::kRate},
      bytes{words(Text::kBytesAxis), chart::ScaleKind::kLog2, chart::Unit::kBytes};
  const size_t passes = std::min<size_t>(f.passes.size(), 2);
  for (size_t p = 0; p < passes; ++p) {
    const std::string& pass = f.passes[p];
    if (!f.constant_tokens) {
      chart::Panel panel = panel_of(words, f, pass, words(Text::kTimePanel, {words.pass(pass)}), time, time_of);
      const std::string fitted = standard.empty() ? ours : standard;
      const bool by_length = f.over == "seqlen";
      if (const auto fit = by_length ? fit_power_law(points_of(f, pass, fitted)) : std::nullopt)
        panel.references.push_back({chart::Reference::Kind::kPower,
                                    fmt::format("{}: {:.2f} ({:.2f} – {:.2f})", words.contestant(fitted), fit->exponent, fit->low, fit->high),
                                    fit->factor, fit->exponent, look_for(fitted, drawn_of(f))});
      if (const auto points = points_of(f, pass, ours); by_length && !points.empty()) {
        const auto [x, y] = points.back();
        panel.references.push_back({chart::Reference::Kind::kPower, words(Text::kSlopeTwo), y / (x * x), 2});
      }
      chart.panels.push_back(std::move(panel));
    } else {
      chart::Panel panel = panel_of(words, f, pass, words(Text::kRatePanel, {words.pass(pass)}), rate, [](const RowOfRecord& row, double n) {
        return chart::Point{n, row.flops_per_s.value_or(chart::kNotKnown)};
      });
      const RowOfRecord* last = f.row(pass, ours, f.values.back());
      if (last && last->ok() && last->flops_per_s && last->peak_fraction && *last->peak_fraction > 0)
        panel.references.push_back({chart::Reference::Kind::kLevel, words(Text::kPeakReference), *last->flops_per_s / *last->peak_fraction});
      chart.panels.push_back(std::move(panel));
    }
  }
  if (!standard.empty() && !ours.empty())
    for (size_t p = 0; p < passes && !f.constant_tokens; ++p) chart.panels.push_back(speedup_panel(words, f, f.passes[p], standard));
  const std::string& pass = f.passes.back();
  if (!standard.empty() || !f.constant_tokens)
    chart.panels.push_back(panel_of(words, f, pass, words(Text::kMemoryBySeqlen, {words.pass(pass)}), bytes, [](const RowOfRecord& row, double n) {
      return chart::Point{n, memory_of(row).value_or(chart::kNotKnown)};
    }));
  return figure;
}

PageTable table_of(const Words& words, const Family& f) {
  PageTable table;
  table.caption = words(Text::kSeqlenTable, {words.device(f.device), words_of(words, f)});
  table.heads = {axis_of(words, f),          words(Text::kHeadPass), words(Text::kHeadContestant), words(Text::kHeadTime),
                 words(Text::kHeadInterval), words(Text::kHeadRate), words(Text::kHeadExtra)};
  table.numeric = {true, false, false, true, true, true, true};
  for (const double n : f.values)
    for (const std::string& pass : f.passes)
      for (const std::string& name : f.contestants) {
        const RowOfRecord* row = f.row(pass, name, n);
        if (!row) continue;
        if (!row->ok()) {
          table.rows.push_back({count_text(n), words.pass(pass), words.contestant(name), clean(row->status)});
          continue;
        }
        table.rows.push_back({count_text(n), words.pass(pass), words.contestant(name), seconds_text(row->time->median),
                              seconds_range(row->time->low, row->time->high), row->flops_per_s ? rate_text(*row->flops_per_s) : "",
                              row->extra_bytes ? bytes_text(*row->extra_bytes) : ""});
      }
  return table;
}

std::vector<std::string> sentences_of(const Words& words, const Family& f) {
  std::vector<std::string> sentences;
  const std::string standard = standard_of(f), ours = ours_of(f), device = words.device(f.device), family = words_of(words, f);
  if (!f.constant_tokens && f.over == "seqlen")
    for (const std::string& name : {ours, standard})
      if (const auto fit = name.empty() ? std::nullopt : fit_power_law(points_of(f, f.passes[0], name))) {
        const auto points = points_of(f, f.passes[0], name);
        sentences.push_back(words(Text::kExponent, {device, family, words.pass(f.passes[0]), count_text(points.front().first),
                                                    count_text(points.back().first), words.contestant(name), fmt::format("{:.2f}", fit->exponent),
                                                    fmt::format("{:.2f}", fit->low), fmt::format("{:.2f}", fit->high), std::to_string(fit->points)}));
      }
  for (auto n = f.values.rbegin(); n != f.values.rend() && f.over == "seqlen" && !standard.empty() && !ours.empty(); ++n) {
    const RowOfRecord *row = f.row(f.passes.back(), ours, *n), *base = f.row(f.passes.back(), standard, *n);
    if (!row || !base || !row->ok() || !base->ok() || !memory_of(*row) || !memory_of(*base)) continue;
    sentences.push_back(words(Text::kMemoryGrowth, {device, words.pass(f.passes.back()), count_text(*n), words.contestant(standard),
                                                    bytes_text(*base->extra_bytes), bytes_text(*row->extra_bytes)}));
    break;
  }
  return sentences;
}

}  // namespace

Section by_seqlen(const Material& m) {
  const Words& words = m.words;
  Section section{"seqlen", words(Text::kBySeqlen), {}};
  std::map<std::string, size_t> drawn;
  size_t figures = 0, left_out = 0;
  std::vector<std::string> sentences;
  std::vector<Block> blocks;
  for (const Family& f : m.families) {
    if (ours_of(f).empty()) continue;
    if (figures >= kMostCurves || drawn[f.device + f.dtype + f.over] >= kMostOfADtype) {
      ++left_out;
      continue;
    }
    ++figures, ++drawn[f.device + f.dtype + f.over];
    for (std::string& sentence : sentences_of(words, f)) sentences.push_back(std::move(sentence));
    blocks.push_back(Block::of(figure_of(words, f)));
    blocks.push_back(Block::of(table_of(words, f), true));
    blocks.push_back(repeating(words, f.records));
  }
  if (!sentences.empty()) section.blocks.push_back(Block::bullets(std::move(sentences)));
  section.blocks.insert(section.blocks.end(), blocks.begin(), blocks.end());
  if (left_out > 0 && figures > 0) section.blocks.push_back(Block::paragraph(words(Text::kMoreFamilies, {std::to_string(left_out)})));
  return section;
}

}  // namespace fattn::lab::report
