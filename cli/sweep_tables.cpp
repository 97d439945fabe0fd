#include "cli/sweep_tables.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "cli/report.h"
#include "cli/sanitize.h"
#include "cli/streams.h"
#include "cli/table.h"
#include "cli/terminal.h"
#include "lab/chart/quantity.h"
#include "lab/chart/terminal_plot.h"
#include "lab/sweep/figures.h"
#include "lab/sweep/presets.h"

namespace fattn::cli {
namespace {

constexpr size_t kPlotWidth = 78, kPlotHeight = 10;

std::string title_of_pass(const std::string& pass) {
  return pass == "fwd" ? "forward (fwd)" : pass == "bwd" ? "backward (bwd)" : "forward and backward (fwdbwd)";
}

Cell rate_cell(double rate) { return {lab::chart::text_of(lab::chart::Unit::kRate, rate), fmt::format("{}", rate)}; }

// `told` holds the reasons that an earlier table has given already.
void print_pass_table(Output& out, const lab::Sweep& sweep, const std::string& pass, std::set<std::string>& told) {
  const std::string base = sweep.baseline;
  Table table({Column::text(name_of(sweep.axis)).as_key(), Column::text("contestant").as_key(), Column::number("time", "s"),
               Column::number("95 % interval", "s").ranked(7), Column::number("GFLOP/s").ranked(3), Column::number("of ceiling").ranked(3).if_any(),
               Column::text("rating").if_any(), Column::number("tokens/s").ranked(4), Column::number("extra memory", "bytes").ranked(1),
               Column::number("vs " + (base.empty() ? "baseline" : base)).if_any(), Column::number("of its memory").ranked(2).if_any(),
               Column::text("worst error and its bound").ranked(5)},
              title_of_pass(pass));
  for (const int64_t value : sweep.values) {
    std::string shown = text_of_value(sweep.axis, value);
    for (const std::string& contestant : sweep.contestants) {
      const lab::Cell* cell = sweep.cell(value, contestant, pass);
      if (!cell) continue;
      const std::string name = printable(contestant, 60);
      if (!cell->ok()) {
        table.add({shown, name,
                   fattn::cli::Cell(cell->status).in(cell->status == "check_failed" || cell->status == "refused" ? Mood::kBad : Mood::kUnsure), "",
                   "", "", "", "", "", "", "", cell->error});
        if (told.insert(contestant + cell->reason).second) table.note(printable(cell->reason, 600));
        continue;
      }
      const bool compared = cell->speedup && contestant != base;
      table.add({shown, name, seconds_cell(*cell->seconds),
                 cell->seconds_low && cell->seconds_high
                     ? fattn::cli::Cell(seconds_text(*cell->seconds_low) + " - " + seconds_text(*cell->seconds_high),
                                        fmt::format("{} - {}", *cell->seconds_low, *cell->seconds_high))
                     : "",
                 cell->flops_per_s ? giga_cell(*cell->flops_per_s) : "", cell->ceiling_fraction ? percent_cell(*cell->ceiling_fraction) : "",
                 rating_cell(cell->rating), cell->tokens_per_s ? rate_cell(*cell->tokens_per_s) : "",
                 cell->extra_bytes ? bytes_cell(*cell->extra_bytes) : "", compared ? times_cell(*cell->speedup, cell->undecided) : "",
                 compared && cell->memory_share ? percent_cell(*cell->memory_share) : "", cell->error});
    }
  }
  out.print(table);
}

void print_plot(const Output& out, const lab::Sweep& sweep, const std::string& pass) {
  if (!is_terminal(out.words()) || out.for_programs() || sweep.axis == lab::SweepAxis::kCausal || sweep.values.size() < 2) return;
  lab::chart::Panel panel = lab::time_panel(sweep, pass);
  panel.title = "time of a call by " + panel.x.title;
  for (lab::chart::Line& line : panel.lines) line.name = printable(line.name, 40);
  const size_t width = std::min(width_of(out.words()), kPlotWidth);
  const std::string plot = lab::chart::terminal_plot(panel, {width, kPlotHeight, shows_colour(out.words())});
  if (!plot.empty()) put(out.words(), "\n" + plot);
}

// Beside what the documents say of another machine.
void print_headline(Output& out, const lab::Sweep& sweep) {
  constexpr lab::Headline documents = lab::kDocuments;
  struct Line {
    const char *what, *pass;
    bool memory;
    std::string theirs;
  };
  const Line lines[] = {{"forward, times as fast", "fwd", false, fmt::format("{:g}x", documents.forward)},
                        {"backward, times as fast", "bwd", false, fmt::format("{:g}x", documents.backward)},
                        {"both, times as fast", "fwdbwd", false, ""},
                        {"memory, both passes", "fwdbwd", true, fmt::format("{:.0f} %", 100 * documents.memory_share)}};
  for (const std::string& contestant : sweep.contestants) {
    if (contestant == sweep.baseline || sweep.baseline.empty()) continue;
    std::vector<Column> columns = {Column::text(printable(contestant, 40) + " over " + printable(sweep.baseline, 40)).as_key()};
    for (const int64_t value : sweep.values) columns.push_back(Column::number(text_of_value(sweep.axis, value)));
    columns.push_back(Column::number("documents"));
    Table table(columns, "Beside the documents, whose GPU is not named");
    for (const Line& line : lines) {
      if (std::find(sweep.passes.begin(), sweep.passes.end(), line.pass) == sweep.passes.end()) continue;
      std::vector<fattn::cli::Cell> cells = {line.what};
      for (const int64_t value : sweep.values) {
        const lab::Cell* cell = sweep.cell(value, contestant, line.pass);
        if (line.memory)
          cells.push_back(cell && cell->memory_share ? percent_cell(*cell->memory_share) : "not known");
        else
          cells.push_back(cell && cell->speedup ? times_cell(*cell->speedup, cell->undecided) : "not known");
      }
      cells.emplace_back(line.theirs);
      table.add(cells);
    }
    out.print(table);
  }
  out.say("memory: what a call adds to its inputs, as a share of " + printable(sweep.baseline, 40) +
              "'s; the documents do not say what theirs counts. Theirs is of batch 16, seqlen 1024, 32 heads of 64, and of PyTorch's attention.",
          2);
}

}  // namespace

void print_sweep(Output& out, const lab::Sweep& sweep) {
  std::set<std::string> told;
  for (const std::string& pass : sweep.passes) {
    print_pass_table(out, sweep, pass, told);
    print_plot(out, sweep, pass);
  }
  if (sweep.preset == "headline") print_headline(out, sweep);
}

}  // namespace fattn::cli
