// Numbers come from lab/course and lab/memory; here they become tables, plots, a question and its answer.
#include "cli/lab_steps.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>

#include "cli/progress.h"
#include "cli/report.h"
#include "cli/sanitize.h"
#include "cli/streams.h"
#include "cli/terminal.h"
#include "fattn/system.hpp"
#include "lab/chart/terminal_plot.h"
#include "lab/course/blocks.h"
#include "lab/course/online_softmax.h"
#include "lab/course/race.h"
#include "lab/memory/machine.h"
#include "lab/memory/papers.h"

namespace fattn::cli {
namespace {

using lab::RaceEntry;
using measure::Pass;
using measure::ProblemSpec;
using nlohmann::ordered_json;
namespace chart = lab::chart;

constexpr size_t kPlotWidth = 72, kPlotHeight = 8;
constexpr int64_t kTile = 64;  // of the last step

// What is measured: small on a CPU, sizes that fill it on a GPU.
ProblemSpec spec_of(const measure::Placement& place, int64_t seqlen) {
  const bool gpu = place.device == Device::kCuda;
  ProblemSpec spec;
  spec.batch = 1;
  spec.seqlen_q = spec.seqlen_k = seqlen;
  spec.nheads = spec.nheads_k = gpu ? 16 : 4;
  spec.headdim = spec.headdim_v = 64;
  spec.dtype = gpu ? DType::kBF16 : DType::kF32;
  return spec;
}
std::vector<int64_t> lengths_of(const measure::Placement& place) {
  return place.device == Device::kCuda ? std::vector<int64_t>{1024, 2048, 4096, 8192} : std::vector<int64_t>{256, 512, 1024, 2048};
}

std::string times_text(double ratio) { return fmt::format("{:.{}f}", ratio, ratio < 9.95 ? 1 : 0); }

// One race a length.
struct Races {
  std::vector<int64_t> lengths;
  std::vector<std::vector<RaceEntry>> rows;

  const RaceEntry& at(size_t row, size_t who) const { return rows[row][who]; }
  bool timed(size_t row, size_t who) const { return at(row, who).ok(); }
  // Of the two longest lengths, if both were timed.
  std::optional<double> growth(size_t who) const {
    const size_t last = rows.size() - 1;
    if (!timed(last, who) || !timed(last - 1, who)) return std::nullopt;
    return at(last, who).time.median / at(last - 1, who).time.median;
  }
  double difference() const {
    double worst = 0;
    for (const auto& row : rows)
      for (const RaceEntry& entry : row)
        if (entry.ok()) worst = std::max(worst, entry.difference);
    return worst;
  }
};

Races run_races(const LabStage& stage, Pass pass, const std::vector<std::string>& algorithms) {
  Races races;
  races.lengths = lengths_of(stage.place);
  Progress progress("measuring", static_cast<int64_t>(races.lengths.size()));
  for (const int64_t seqlen : races.lengths) {
    races.rows.push_back(lab::race(spec_of(stage.place, seqlen), pass, algorithms, stage.place));
    progress.step();
  }
  progress.wipe();
  return races;
}

ordered_json json_of(const Races& races, const LabStage& stage) {
  ordered_json rows = ordered_json::array();
  for (size_t i = 0; i < races.rows.size(); ++i)
    for (const RaceEntry& entry : races.rows[i]) {
      const ProblemSpec spec = spec_of(stage.place, races.lengths[i]);
      ordered_json row = {{"seqlen", spec.seqlen_q},
                          {"nheads", spec.nheads},
                          {"headdim", spec.headdim},
                          {"dtype", name_of(spec.dtype)},
                          {"algorithm", entry.algorithm}};
      row["status"] = entry.ok() ? "ok" : "failed";
      if (!entry.ok()) row["reason"] = entry.reason;
      if (entry.ok()) row.update({{"time_median_s", entry.time.median}, {"extra_bytes", entry.extra_bytes}, {"difference", entry.difference}});
      rows.push_back(std::move(row));
    }
  return rows;
}

// Why something has no time, and how far results are apart.
void say_results(const LabStage& stage, const Races& races) {
  bool compared = false;
  for (size_t i = 0; i < races.rows.size(); ++i) {
    for (const RaceEntry& entry : races.rows[i])
      if (!entry.ok()) stage.out.say(stage.words(LabText::kNotTimed, entry.algorithm, races.lengths[i], printable(entry.reason, 300)), 2);
    compared = compared || (races.timed(i, 0) && races.timed(i, 1));
  }
  const double allowed = lab::course_limit(spec_of(stage.place, 1).dtype);
  if (compared) stage.out.say(stage.words(LabText::kSameResult, short_text(races.difference()), short_text(allowed)));
}

// Behind an empty line, as a table with a title is.
void print_table(const LabStage& stage, const Table& table) {
  stage.out.say("\n");
  stage.out.print(table);
}

void print_plot(const LabStage& stage, const chart::Panel& panel) {
  if (stage.out.for_programs()) return;
  const size_t width = std::min(width_of(stage.out.words()), kPlotWidth);
  const std::string plot = chart::terminal_plot(panel, {width, kPlotHeight, shows_colour(stage.out.words())});
  if (!plot.empty()) put(stage.out.words(), "\n" + plot);
}

chart::Panel panel_by_length(const std::string& title, chart::Unit unit) {
  chart::Panel panel;
  panel.title = title;
  panel.x.title = "seqlen";
  panel.x.scale = chart::ScaleKind::kLog2;
  panel.y.scale = unit == chart::Unit::kTimes ? chart::ScaleKind::kLinear : chart::ScaleKind::kLog2;
  panel.y.unit = unit;
  return panel;
}

// What races took of memory.
chart::Panel memory_panel(const std::string& title, const Races& races) {
  chart::Panel panel = panel_by_length(title, chart::Unit::kBytes);
  for (size_t who = 0; who < races.rows[0].size(); ++who) {
    chart::Line line;
    line.name = races.at(0, who).algorithm;
    line.look = static_cast<int>(who);
    for (size_t i = 0; i < races.rows.size(); ++i)
      if (races.timed(i, who)) line.points.push_back({static_cast<double>(races.lengths[i]), static_cast<double>(races.at(i, who).extra_bytes)});
    panel.lines.push_back(std::move(line));
  }
  return panel;
}

// seqlen, perhaps the matrix, then time and memory of each.
void print_races(const LabStage& stage, const Races& races, bool matrix) {
  std::vector<Column> columns = {Column::number(stage.words(LabText::kSeqlen)).as_key()};
  if (matrix) columns.push_back(Column::number(stage.words(LabText::kMatrixColumn), "bytes"));
  for (const RaceEntry& entry : races.rows[0]) {
    columns.push_back(Column::number(stage.words(LabText::kTimeOf, entry.algorithm), "s"));
    columns.push_back(Column::number(stage.words(LabText::kMemoryOf, entry.algorithm), "bytes"));
  }
  Table table(std::move(columns));
  for (size_t i = 0; i < races.rows.size(); ++i) {
    const double n = static_cast<double>(races.lengths[i]);
    std::vector<Cell> cells = {count_cell(races.lengths[i])};
    if (matrix) cells.push_back(bytes_cell(n * n * static_cast<double>(size_of(spec_of(stage.place, 1).dtype))));
    for (size_t who = 0; who < races.rows[i].size(); ++who) {
      const RaceEntry& entry = races.at(i, who);
      cells.push_back(entry.ok() ? seconds_cell(entry.time.median) : Cell("-", ""));
      cells.push_back(entry.ok() ? bytes_cell(static_cast<double>(entry.extra_bytes)) : Cell("-", ""));
    }
    table.add(std::move(cells));
  }
  print_table(stage, table);
}

ordered_json whole_matrix(LabStage& stage) {
  const ProblemSpec spec = spec_of(stage.place, 1);
  stage.out.say(stage.words(LabText::kMatrixText, spec.nheads, spec.headdim, name_of(spec.dtype)));
  const Races races = run_races(stage, Pass::kForward, {"standard", "v2"});
  print_races(stage, races, true);
  say_results(stage, races);
  print_plot(stage, memory_panel(stage.words(LabText::kMatrixPlot), races));
  const size_t last = races.rows.size() - 1;
  const int64_t from = races.lengths[last - 1], to = races.lengths[last];
  const double memory =
      static_cast<double>(races.at(last, 1).extra_bytes) / static_cast<double>(std::max<int64_t>(races.at(last - 1, 1).extra_bytes, 1));
  const auto standard = races.growth(0), v2 = races.growth(1);
  ordered_json found = {{"rows", json_of(races, stage)}, {"question", stage.words(LabText::kMatrixQuestion)}};
  found["answer"] = standard && v2 ? stage.words(LabText::kMatrixAnswer, times_text(*standard), from, to, times_text(*v2), times_text(memory))
                                   : stage.words(LabText::kMatrixAnswerAlone, times_text(memory), from, to);
  return found;
}

// Numbers of tiles in the order of the two loops, beside each other.
std::string orders_drawn() {
  constexpr int kSide = 5;
  std::string text = fmt::format("    {:<22}{}\n", "v1", "v2");
  for (int i = 0; i < kSide; ++i) {
    std::string v1, v2;
    for (int j = 0; j < kSide; ++j) {
      v1 += fmt::format("{:>4}", 1 + j * kSide + i);
      v2 += fmt::format("{:>4}", 1 + i * kSide + j);
    }
    text += v1 + "  " + v2 + "\n";
  }
  return text;
}

ordered_json tiles(LabStage& stage) {
  stage.out.say(stage.words(LabText::kTilesText));
  if (!stage.out.for_programs()) put(stage.out.words(), "\n" + orders_drawn() + "\n");
  // A GPU's shared memory of a block; of a core the cache that is nearest to it, which one head does not fit into.
  const bool gpu = stage.place.device == Device::kCuda;
  const double chip_bytes =
      gpu ? lab::memory_machine(stage.place.name()).chip_bytes : static_cast<double>(std::max<int64_t>(cpu_info().l1d_bytes, 32768));
  stage.out.say(stage.words(LabText::kTilesTraffic, bytes_text(chip_bytes), gpu ? "SM" : "L1"));
  const std::vector<std::string> algorithms = {"standard", "v1", "v2"};
  Table table({Column::number(stage.words(LabText::kSeqlen)).as_key(), Column::number(stage.words(LabText::kTilesOnce), "bytes"),
               Column::number("standard", "bytes"), Column::number("v1", "bytes"), Column::number("v2", "bytes")});
  chart::Panel panel = panel_by_length(stage.words(LabText::kTilesPlot), chart::Unit::kBytes);
  panel.lines.resize(algorithms.size());
  ordered_json rows = ordered_json::array();
  std::vector<std::vector<double>> moved;
  for (const int64_t seqlen : lengths_of(stage.place)) {
    const ProblemSpec spec = spec_of(stage.place, seqlen);
    const double once = static_cast<double>(spec.input_bytes(false) + spec.o_bytes());
    std::vector<Cell> cells = {count_cell(seqlen), bytes_cell(once)};
    ordered_json row = {{"seqlen", seqlen}, {"inputs_and_outputs_bytes", once}};
    moved.emplace_back();
    for (size_t a = 0; a < algorithms.size(); ++a) {
      double bytes = 0;
      for (const measure::MovedTerm& term : lab::papers_terms(algorithms[a], spec, Pass::kForward, chip_bytes)) bytes += term.bytes;
      moved.back().push_back(bytes);
      cells.push_back(bytes_cell(bytes));
      row[algorithms[a] + "_bytes"] = bytes;
      panel.lines[a].name = algorithms[a];
      panel.lines[a].look = static_cast<int>(a);
      panel.lines[a].points.push_back({static_cast<double>(seqlen), bytes});
    }
    table.add(std::move(cells));
    rows.push_back(std::move(row));
  }
  print_table(stage, table);
  print_plot(stage, panel);
  const size_t last = moved.size() - 1;
  return {
      {"rows", rows},
      {"question", stage.words(LabText::kTilesQuestion)},
      {"answer", stage.words(LabText::kTilesAnswer, times_text(moved[last][2] / moved[last - 1][2]), percent_text(moved[last][2] / moved[last][0]))}};
}

ordered_json softmax(LabStage& stage) {
  const std::vector<double> scores = {1, 3, 2, -1, 7, 0, 6, 7.5};
  std::vector<double> values(scores.size());
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(i);
  const std::vector<lab::SoftmaxStep> steps = lab::online_softmax(scores, values, 2);
  stage.out.say(stage.words(LabText::kSoftmaxText));
  Table table({Column::text(stage.words(LabText::kSoftmaxScores)).as_key(), Column::number("m"), Column::number(stage.words(LabText::kSoftmaxFactor)),
               Column::number("l"), Column::number("a"), Column::number("a / l"), Column::number(stage.words(LabText::kSoftmaxExact))});
  double worst = 0;
  ordered_json rows = ordered_json::array();
  for (const lab::SoftmaxStep& step : steps) {
    std::string shown;
    for (size_t j = step.begin; j < step.end; ++j) shown += fmt::format("{}{:g}", shown.empty() ? "" : ", ", scores[j]);
    const auto cell = [](double value) { return Cell(fmt::format("{:.5f}", value), fmt::format("{}", value)); };
    table.add({shown, cell(step.greatest), cell(step.factor), cell(step.sum), cell(step.weighted), cell(step.result()), cell(step.exact)});
    worst = std::max(worst, std::fabs(step.result() - step.exact));
    rows.push_back({{"keys", step.end}, {"m", step.greatest}, {"factor", step.factor}, {"l", step.sum}, {"a", step.weighted}, {"exact", step.exact}});
  }
  print_table(stage, table);
  chart::Panel panel;
  panel.title = stage.words(LabText::kSoftmaxPlot);
  panel.x.title = stage.words(LabText::kSoftmaxKeys);
  chart::Line line;
  line.name = "a / l";
  for (const lab::SoftmaxStep& step : lab::online_softmax(scores, values, 1)) line.points.push_back({static_cast<double>(step.end), step.result()});
  panel.lines.push_back(std::move(line));
  print_plot(stage, panel);
  const auto text = [](double value) { return fmt::format("{:g}", value); };
  return {{"rows", rows},
          {"question", stage.words(LabText::kSoftmaxQuestion, text(steps[1].greatest), text(steps[2].greatest))},
          {"answer", stage.words(LabText::kSoftmaxAnswer, text(steps[1].greatest), text(steps[2].greatest), fmt::format("{:.5f}", steps[2].factor),
                                 short_text(worst))}};
}

ordered_json backward(LabStage& stage) {
  const ProblemSpec spec = spec_of(stage.place, 1);
  stage.out.say(stage.words(LabText::kBackwardText, fmt::format("H{} D{} {}", spec.nheads, spec.headdim, name_of(spec.dtype))));
  const Races races = run_races(stage, Pass::kBackward, {"standard", "v2"});
  print_races(stage, races, false);
  say_results(stage, races);
  print_plot(stage, memory_panel(stage.words(LabText::kBackwardPlot), races));
  size_t row = races.rows.size() - 1;
  while (row > 0 && !(races.timed(row, 0) && races.timed(row, 1))) --row;
  const RaceEntry &standard = races.at(row, 0), &v2 = races.at(row, 1);
  const auto bytes = [](const RaceEntry& entry) { return bytes_text(static_cast<double>(entry.extra_bytes)); };
  ordered_json found = {{"rows", json_of(races, stage)}, {"question", stage.words(LabText::kBackwardQuestion)}};
  found["answer"] = standard.ok() && v2.ok() ? stage.words(LabText::kBackwardAnswer, bytes(v2), bytes(standard), races.lengths[row],
                                                           seconds_text(v2.time.median), seconds_text(standard.time.median))
                                             : stage.words(LabText::kBackwardAnswerAlone, bytes(races.rows.back()[1]), races.lengths.back());
  return found;
}

// The marks of two masks, beside each other.
std::string masks_drawn(const lab::Blocks& a, const lab::Blocks& b) {
  const auto line = [](const lab::Blocks& blocks, int64_t row) {
    std::string text;
    for (int64_t column = 0; column < blocks.columns; ++column) {
      const lab::BlockKind kind = blocks.at(row, column);
      text += kind == lab::BlockKind::kSkipped ? " ." : kind == lab::BlockKind::kMasked ? " /" : " #";
    }
    return text;
  };
  std::string text;
  for (int64_t row = 0; row < a.rows; ++row) text += "  " + line(a, row) + "      " + line(b, row) + "\n";
  return text;
}

ordered_json masks(LabStage& stage) {
  const std::vector<int64_t> lengths = lengths_of(stage.place);
  const int64_t window = lengths.front() / 2;
  stage.out.say(stage.words(LabText::kMasksText));
  if (!stage.out.for_programs())
    put(stage.out.words(), "\n" + masks_drawn(lab::blocks_of(8 * kTile, kTile, true), lab::blocks_of(8 * kTile, kTile, true, 2 * kTile)) + "\n");
  struct Mask {
    std::string name;
    bool causal;
    int64_t window;
  };
  const std::vector<Mask> all = {{stage.words(LabText::kMasksNone), false, -1},
                                 {stage.words(LabText::kMasksCausal), true, -1},
                                 {stage.words(LabText::kMasksWindow, window), true, window}};
  Table table({Column::number(stage.words(LabText::kSeqlen)).as_key(), Column::text(stage.words(LabText::kMasksMask)).as_key(),
               Column::number(stage.words(LabText::kMasksShare)), Column::number(stage.words(LabText::kMasksTime), "s"),
               Column::number(stage.words(LabText::kMasksSpeed))});
  chart::Panel panel = panel_by_length(stage.words(LabText::kMasksPlot), chart::Unit::kTimes);
  ordered_json rows = ordered_json::array();
  std::vector<double> causal;  // times as fast
  Progress progress("measuring", static_cast<int64_t>(lengths.size() * all.size()));
  panel.lines.resize(all.size() - 1);
  for (const int64_t seqlen : lengths) {
    double whole = 0;
    for (size_t m = 0; m < all.size(); ++m) {
      ProblemSpec spec = spec_of(stage.place, seqlen);
      spec.causal = all[m].causal;
      spec.window_left = all[m].window;
      const RaceEntry entry = lab::race(spec, Pass::kForward, {"auto"}, stage.place)[0];
      progress.step();
      const double share = lab::blocks_of(seqlen, kTile, all[m].causal, all[m].window).computed_fraction();
      if (m == 0 && entry.ok()) whole = entry.time.median;
      const double speed = entry.ok() && whole > 0 ? whole / entry.time.median : 0;
      table.add({m == 0 ? count_cell(seqlen) : Cell("", fmt::format("{}", seqlen)), all[m].name, percent_cell(share),
                 entry.ok() ? seconds_cell(entry.time.median) : Cell("-", ""), m > 0 && speed > 0 ? times_cell(speed, false) : Cell("")});
      if (!entry.ok()) table.note(printable(entry.reason, 300));
      ordered_json row = {{"seqlen", seqlen}, {"causal", all[m].causal}, {"window_left", all[m].window}, {"tiles_fraction", share}};
      row["time_median_s"] = entry.ok() ? ordered_json(entry.time.median) : ordered_json(nullptr);
      rows.push_back(std::move(row));
      if (m == 1) causal.push_back(speed);
      if (m == 0 || !(speed > 0)) continue;
      panel.lines[m - 1].name = all[m].name;
      panel.lines[m - 1].look = static_cast<int>(m);
      panel.lines[m - 1].points.push_back({static_cast<double>(seqlen), speed});
    }
  }
  progress.wipe();
  print_table(stage, table);
  print_plot(stage, panel);
  const auto share = [](int64_t seqlen) { return percent_text(lab::blocks_of(seqlen, kTile, true).computed_fraction()); };
  return {{"rows", rows},
          {"question", stage.words(LabText::kMasksQuestion)},
          {"answer", stage.words(LabText::kMasksAnswer, share(lengths.front()), lengths.front(), share(lengths.back()), lengths.back(),
                                 times_text(causal.front()), times_text(causal.back()))}};
}

}  // namespace

const char* lab_sentence(LabText text, bool chinese) {
  struct Sentence {
    const char *english, *chinese;
  };
  static constexpr Sentence kSentences[] = {
#define FATTN_TEXT(name, english, chinese) Sentence{english, chinese},
      FATTN_LAB_TEXTS(FATTN_TEXT)
#undef FATTN_TEXT
  };
  const Sentence& sentence = kSentences[static_cast<size_t>(text)];
  return chinese ? sentence.chinese : sentence.english;
}

const std::vector<LabStep>& lab_steps() {
  static const std::vector<LabStep> kSteps = {{"whole_matrix", LabText::kMatrixTitle, whole_matrix},
                                              {"tiles", LabText::kTilesTitle, tiles},
                                              {"online_softmax", LabText::kSoftmaxTitle, softmax},
                                              {"backward", LabText::kBackwardTitle, backward},
                                              {"masks", LabText::kMasksTitle, masks}};
  return kSteps;
}

}  // namespace fattn::cli
