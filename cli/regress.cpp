// The rows that matter first; what stayed the same is counted.
#include "cli/regress.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cli/json_output.h"
#include "cli/measure_again.h"
#include "cli/output.h"
#include "cli/sanitize.h"
#include "cli/table.h"
#include "cli/usage_error.h"
#include "cli/values.h"
#include "cli/words.h"
#include "lab/regress.h"

namespace fattn::cli {
namespace {

using namespace lab;

struct RegressFlags {
  std::string baseline, current, save, json;
  std::vector<std::string> measure, match;
  double margin_percent = 1;
  bool across_machines = false, across_flags = false, across_clocks = false, all = false;
  OutputFlags output;
};

constexpr size_t kMostSameRows = 12;

std::string change_text(double ratio) { return fmt::format("{:+.1f} %", 100 * (ratio - 1)); }

Mood mood_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::kWorse:
    case Verdict::kFailed: return Mood::kBad;
    case Verdict::kBetter: return Mood::kGood;
    case Verdict::kSame: return Mood::kPlain;
    default: return Mood::kUnsure;
  }
}

std::vector<std::pair<std::string, std::string>> matches(const std::vector<std::string>& given) {
  std::vector<std::pair<std::string, std::string>> all;
  for (const std::string& one : given) {
    const size_t at = one.find('=');
    if (at == std::string::npos || at == 0 || at + 1 == one.size())
      throw CLI::ValidationError("--match", "'" + printable(one, 80) + "' is no pair of contestants; give one of the baseline and one of now: v2=v3");
    all.emplace_back(one.substr(0, at), one.substr(at + 1));
  }
  return all;
}

MeasuredRecord read(const std::string& file) {
  MeasuredRecord record = measured_record(read_json(file), file);
  return record;
}

// The current record: read, or measured now with the flags given, or with those of the baseline.
MeasuredRecord current_of(const RegressFlags& flags, const MeasuredRecord& baseline) {
  if (!flags.current.empty()) return read(flags.current);
  std::vector<std::string> arguments = flags.measure;
  const bool named = !arguments.empty() && arguments.front().rfind('-', 0) != 0;  // -- compare --seqlen 512
  if (arguments.empty()) arguments = baseline.flags;
  if (!named) arguments.insert(arguments.begin(), baseline.command == "suite" ? "bench" : baseline.command);
  const std::string file = flags.save.empty() ? temporary_record() : flags.save;
  const int code = measure_again(arguments, file);
  if (code != kExitFine && code != kExitCheckFailed) throw std::runtime_error("nothing was measured that could be compared");
  MeasuredRecord record = read(file);
  if (flags.save.empty()) record.file = "measured now";
  return record;
}

std::string words_of(const MeasuredRecord& record) {
  const JsonPart environment(record.environment, "environment");
  const std::string commit = environment.text("commit", "");
  return fmt::format("{}, {}, version {}{}{}", printable(record.file, 60), printable(environment.text("date", "no date"), 40),
                     printable(environment.text("library_version", "not known"), 40),
                     commit.empty() ? "" : " (" + printable(commit.substr(0, 18)) + ")", record.complete ? "" : ", interrupted");
}

void print(Output& out, std::vector<RowVerdict> rows, bool all) {
  constexpr std::array kOrder = {Verdict::kWorse,  Verdict::kFailed,   Verdict::kVanished, Verdict::kUndecided,
                                 Verdict::kBetter, Verdict::kAppeared, Verdict::kSame};
  const auto rank = [&](const RowVerdict& row) { return std::find(kOrder.begin(), kOrder.end(), row.verdict) - kOrder.begin(); };
  std::stable_sort(rows.begin(), rows.end(), [&](const RowVerdict& a, const RowVerdict& b) { return rank(a) < rank(b); });
  const auto same = static_cast<size_t>(std::count_if(rows.begin(), rows.end(), [](const RowVerdict& row) { return row.verdict == Verdict::kSame; }));
  const bool leave_out = same > kMostSameRows && !all && !out.for_programs();
  if (leave_out) std::erase_if(rows, [](const RowVerdict& row) { return row.verdict == Verdict::kSame; });
  Table table({Column::text("problem").as_key().wrapping(16), Column::text("pass").as_key(), Column::text("contestant").as_key().wrapping(8),
               Column::text("verdict").as_key(), Column::number("time").ranked(1), Column::number("99 % interval"),
               Column::number("was", "s").ranked(3), Column::number("now", "s").ranked(2), Column::text("by").ranked(4).if_any()});
  for (const RowVerdict& row : rows) {
    const auto time = [](const RowOfRecord* r) { return r && r->ok() ? seconds_cell(r->time->median) : Cell(); };
    std::vector<Cell> cells = {printable(row.row().problem(), 100), printable(row.row().pass, 20), printable(row.row().label, 60),
                               Cell(name_of(row.verdict)).in(mood_of(row.verdict))};
    if (const auto& interval = row.time.interval) {
      cells.emplace_back(change_text(interval->ratio), fmt::format("{}", interval->ratio));
      cells.emplace_back(change_text(interval->low) + " to " + change_text(interval->high), fmt::format("{} to {}", interval->low, interval->high));
    } else {
      cells.resize(cells.size() + 2);
    }
    cells.push_back(time(row.baseline));
    cells.push_back(time(row.current));
    cells.emplace_back(!row.time.interval ? "" : row.time.paired ? "turns, paired" : row.time.by_turns ? "turns" : "samples");
    table.add(std::move(cells));
    if (!row.reason.empty()) table.note(printable(row.reason, 400));
  }
  if (!table.rows().empty()) out.print(table);
  if (leave_out) out.say(fmt::format("{} rows stayed the same; --all lists them", same));
}

void conclude(const Output& out, const std::vector<RowVerdict>& rows, const RegressFlags& flags) {
  const auto count = [&](Verdict v) { return std::count_if(rows.begin(), rows.end(), [v](const RowVerdict& row) { return row.verdict == v; }); };
  std::string text;
  for (const Verdict v :
       {Verdict::kWorse, Verdict::kBetter, Verdict::kSame, Verdict::kUndecided, Verdict::kFailed, Verdict::kVanished, Verdict::kAppeared})
    if (const auto n = count(v); n > 0) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", n, name_of(v));
  const Mood mood = count(Verdict::kWorse) > 0 ? Mood::kBad : count(Verdict::kUndecided) > 0 ? Mood::kUnsure : Mood::kGood;
  out.say(
      "\n" + out.in(mood, text) +
      fmt::format(". A change below {:g} % is none; worse and better are said where the one-sided 99 % interval lies wholly beyond that, same where "
                  "it lies wholly inside.",
                  flags.margin_percent));
  std::vector<double> widths;
  for (const RowVerdict& row : rows)
    if (row.verdict == Verdict::kUndecided && row.time.interval) widths.push_back(50 * (row.time.interval->high - row.time.interval->low));
  if (!widths.empty())
    out.say(
        fmt::format("Undecided rows are known to {:.1f} % on average (half of the interval, the median row): more --repeats, a quieter machine or a "
                    "wider --margin decides them.",
                    median_of(widths)));
}

int run_regress(const RegressFlags& flags) {
  RegressOptions options;
  options.margin = flags.margin_percent / 100;
  options.across_machines = flags.across_machines;
  options.across_flags = flags.across_flags;
  options.across_clocks = flags.across_clocks;
  options.match = matches(flags.match);
  require_writable(flags.json);
  require_writable(flags.save);
  const MeasuredRecord baseline = read(flags.baseline);
  const MeasuredRecord current = current_of(flags, baseline);
  if (const std::vector<std::string> lines = obstacles(baseline, current, options); !lines.empty()) {
    std::string text = "these two are not the same measurement:";
    for (const std::string& line : lines) text += "\n  " + printable(line, 300);
    print_error(text);
    return kExitBadInput;
  }
  const std::vector<RowVerdict> rows = regress(baseline, current, options);
  Output out(flags.output, flags.json);
  out.say("baseline  " + words_of(baseline), 10);
  out.say("current   " + words_of(current), 10);
  for (const MeasuredRecord* record : {&baseline, &current})
    if (const std::string warning = JsonPart(record->disturbance, "disturbance").text("warning", ""); !warning.empty())
      out.say(out.in(Mood::kUnsure, (record == &baseline ? "baseline: " : "current: ") + printable(warning, 200)), 2);
  for (std::string line : obstacles(baseline, current, {}))
    out.say(out.in(Mood::kUnsure, printable(line.substr(0, line.rfind(" (--across")), 200) + ", and compared all the same"), 2);
  print(out, rows, flags.all);
  conclude(out, rows, flags);
  if (!flags.json.empty()) write_json(to_json(rows, baseline, current, options), flags.json);
  return std::any_of(rows.begin(), rows.end(), [](const RowVerdict& row) { return row.verdict == Verdict::kWorse; }) ? kExitCheckFailed : kExitFine;
}

}  // namespace

void add_regress(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("regress", "Compare a record with an earlier one: what became slower, what faster");
  auto flags = std::make_shared<RegressFlags>();
  command->add_option("--baseline", flags->baseline, "The earlier record, which bench, compare or a suite wrote")->required()->type_name("FILE");
  CLI::Option* current =
      command->add_option("--current", flags->current, "The later record [measured now, with the baseline's flags or those behind --]")
          ->type_name("FILE");
  command->add_option("flags", flags->measure, "Behind --: what to measure now, in place of the baseline's flags")
      ->type_name("FLAG")
      ->excludes(current);
  command->add_option("--save", flags->save, "Where the record that is measured now is kept")->type_name("FILE")->excludes(current);
  command->add_option("--margin", flags->margin_percent, "A change of less than so many per cent of the time is none")
      ->check(number(0, 100))
      ->type_name("PERCENT")
      ->capture_default_str();
  command
      ->add_option("--match", flags->match,
                   "Compare a contestant of the baseline with one that now goes by another name, and nothing else: v2=v3; may be repeated")
      ->type_name("OLD=NEW");
  command->add_flag("--across-machines", flags->across_machines, "Compare records of different machines all the same");
  command->add_flag("--across-flags", flags->across_flags, "Compare records of different flags all the same: rows of the same problem");
  command->add_flag("--across-clocks", flags->across_clocks, "Compare records of different clocks, power limits or peaks all the same");
  command->add_flag("--all", flags->all, "List the rows that stayed the same, too, however many they are");
  command->add_option("--json", flags->json, "Write the verdicts as JSON (docs/RECORD.md); -: to stdout")->type_name("FILE");
  flags->output.add_to(*command);
  command->footer(
      "time: how much longer (+) or shorter (-) the call takes now, with the bounds above and below which it lies with 99 % each. From the means of "
      "the samples' logarithms (Welch), or, where one lies far out, from their "
      "ranks (Mann and Whitney). Where the turns of a measurement differ by more than its samples, and in records without samples, a turn is one "
      "observation. Contestants that took turns with each other (--match within one record) are compared turn by turn. "
      "A row that was ok and is no more is worse, and so is one whose allocated memory grew by more than the margin (without --match).\n"
      "Two runs of one program can differ by more than their samples tell (where memory lies, how warm a device is). Run this once with two records "
      "of the same program to see by how much, and choose --margin above that.\n"
      "Exit 1 if a row is worse, 2 if the records cannot be compared.\n\n"
      "Examples:\n"
      "  fattn bench --preset gpt2-small --json before.json\n"
      "  fattn regress --baseline before.json\n"
      "  fattn regress --baseline before.json --current after.json --margin 2\n"
      "  fattn regress --baseline before.json -- --seqlen 2048 --repeats 50\n"
      "  fattn regress --baseline race.json --current race.json --match v2=v3");
  command->callback([flags, &exit_code] {
    try {
      exit_code = run_regress(*flags);
    } catch (const RecordError& error) {
      throw std::runtime_error(printable(error.what(), 600));
    }
  });
}

}  // namespace fattn::cli
