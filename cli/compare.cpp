// Several contestants take turns on the same inputs.
#include "cli/compare.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <memory>
#include <set>

#include "cli/conclusion.h"
#include "cli/contestants.h"
#include "cli/json_output.h"
#include "cli/kept.h"
#include "cli/oracle_check.h"
#include "cli/output.h"
#include "cli/problem_flags.h"
#include "cli/progress.h"
#include "cli/provider_flags.h"
#include "cli/race.h"
#include "cli/race_flags.h"
#include "cli/report.h"
#include "cli/sanitize.h"
#include "cli/table.h"
#include "cli/values.h"

namespace fattn::cli {
namespace {

using namespace measure;

struct CompareFlags {
  ProblemFlags problem;
  ProviderFlags providers;
  OutputFlags output;
  std::vector<std::string> names;
  double time_limit = 0;
};

// What is wrong with a list of algorithms; "auto" stands alone.
std::string not_algorithms(const std::string& list) {
  const std::vector<std::string> names = split_at_commas(list);
  for (const std::string& name : names)
    if (!algorithm_named(name) && !(name == name_of(Algorithm::kAuto) && names.size() == 1))
      return "'" + printable(name, 40) + "' is no algorithm to compare; allowed: standard, v1, v2 and v3, with commas between them, or auto";
  return names.empty() ? "an algorithm is wanted: standard, v1, v2, v3, several of them with commas, or auto" : "";
}

// Several algorithms are contestants, in their order, before those of --provider.
void take_algorithms(CompareFlags& flags) {
  const std::vector<std::string> algorithms = split_at_commas(flags.problem.target.algorithm);
  if (algorithms.size() < 2) return;
  flags.names.insert(flags.names.begin(), algorithms.begin(), algorithms.end());
  flags.problem.target.algorithm = name_of(Algorithm::kAuto);
}

std::vector<std::string> chosen(const CompareFlags& flags) {
  if (!flags.names.empty()) return flags.names;
  std::vector<std::string> names = {"fattn", "standard"};
  for (const ProviderProgram& provider : flags.providers.found()) names.push_back(provider.name);
  return names;
}

std::string names_of(const std::vector<Row>& rows, const Winner& winner) {
  if (winner.index < 0) return "none";
  std::string text = label_of(rows[static_cast<size_t>(winner.index)]);
  for (int other : winner.undecided_with) text += ", " + label_of(rows[static_cast<size_t>(other)]);
  return winner.undecided_with.empty() ? text : "undecided between " + text;
}

// `told` holds the reasons that an earlier table has given already.
void print_pass(Output& out, const std::vector<Row>& rows, std::set<std::string>& told) {
  const Pass pass = rows.front().pass;
  Table table({Column::text("provider").as_key(), Column::number("median", "s"), Column::number("95 % interval", "s").ranked(5),
               Column::number("GFLOP/s").ranked(2), Column::number("of peak").ranked(3), Column::number("of ceiling").ranked(2).if_any(),
               Column::text("rating").if_any(), Column::number("vs standard").if_any(), Column::number("extra memory", "bytes"),
               Column::number("moved (model)", "bytes").ranked(4).if_any(), Column::text("worst error and its bound").ranked(3),
               Column::number("largest difference to standard").ranked(6).if_any()},
              pass == Pass::kForward    ? "forward (fwd)"
              : pass == Pass::kBackward ? "backward (bwd)"
                                        : "forward and backward (fwdbwd)");
  const auto standard = std::find_if(rows.begin(), rows.end(), [](const Row& row) { return row.who.provider == "standard"; });
  // On the CPU, where algorithm standard has no model, only beside another.
  const bool moved = rows.front().who.device != "cpu" || std::count_if(rows.begin(), rows.end(), [](const Row& row) { return row.moved_bytes; }) > 1;
  for (const Row& row : rows) {
    const std::string name = printable(label_of(row), 60),
                      difference = row.max_difference_to_standard ? short_text(*row.max_difference_to_standard) : "";
    if (!row.ok() || !row.time) {
      table.add({name, Cell(name_of(row.status)).in(row.status == Status::kCheckFailed ? Mood::kBad : Mood::kUnsure), "", "", "", "", "", "", "", "",
                 worst_check(row)});
      if (told.insert(row.reason).second) table.note(printable(row.reason, 600));
      continue;
    }
    Cell speedup;
    if (row.speedup_over_standard && &row != &*standard) speedup = times_cell(*row.speedup_over_standard, undecided(*row.time, *standard->time));
    table.add({name, seconds_cell(row.time->median), interval_cell(*row.time), giga_cell(*row.flops_per_s),
               row.peak_fraction ? percent_cell(*row.peak_fraction) : "", row.ceiling ? percent_cell(row.ceiling->fraction) : "",
               row.ceiling ? rating_cell(row.ceiling->rating) : "", speedup,
               row.memory ? bytes_cell(static_cast<double>(row.memory->extra_bytes)) : "",
               row.moved_bytes && moved ? bytes_cell(*row.moved_bytes) : "", worst_check(row), row.who.provider == "standard" ? "" : difference});
  }
  out.print(table);
  out.say(fmt::format("fastest: {}; leanest: {}", printable(names_of(rows, fastest(rows))), printable(names_of(rows, leanest(rows)))), 2);
}

std::vector<std::string> repeating_flags(const CompareFlags& flags) {
  std::vector<std::string> repeating = flags.problem.repeating_flags();
  for (const std::string& name : chosen(flags)) repeating.insert(repeating.end(), {"--provider", name});
  if (flags.time_limit > 0) repeating.insert(repeating.end(), {"--time-limit", fmt::format("{}", flags.time_limit)});
  const std::vector<std::string> more = flags.providers.repeating_flags();
  repeating.insert(repeating.end(), more.begin(), more.end());
  for (std::string& flag : repeating) flag = printable(flag);
  return repeating;
}

int compare(const CompareFlags& flags) {
  const ProblemFlags& problem = flags.problem;
  require_writable(problem.json());
  const ProblemSpec spec = problem.spec();
  RaceOptions options = race_options(problem, spec);
  options.time_limit = flags.time_limit;

  std::vector<std::unique_ptr<Contestant>> owned;
  std::vector<Contestant*> contestants;
  for (const std::string& name : chosen(flags)) {
    owned.push_back(make_contestant(name, options.library, options.place, flags.providers));
    contestants.push_back(owned.back().get());
  }
  measure_reads(options, spec);

  RaceResult result;
  {
    Kept kept(problem.json());
    options.keep = [&](const RaceResult& so_far, const std::string& what) {
      kept.keep({"compare", repeating_flags(flags), so_far.before, so_far.after, so_far.rows, nlohmann::ordered_json::array()}, what);
    };
    Progress progress("compare");
    options.progress = &progress;
    result = race(spec, contestants, options);
  }

  Output out(flags.output, problem.json());
  out.say(fmt::format("{}, {}: checked against the float64 oracle, then timed in turns", describe(spec),
                      result.before.device == "cpu" ? fmt::format("{} thread{}", result.before.threads, result.before.threads == 1 ? "" : "s")
                                                    : result.before.device));
  std::set<std::string> told;
  nlohmann::ordered_json summary = nlohmann::ordered_json::array();
  for (size_t p = 0; p < options.passes.size(); ++p) {
    const auto begin = result.rows.begin() + static_cast<std::ptrdiff_t>(p * contestants.size());
    std::vector<Row> rows(begin, begin + static_cast<std::ptrdiff_t>(contestants.size()));
    // Who was not asked for by name has no row of its own where it is not here, but a part of one line below.
    if (flags.names.empty()) std::erase_if(rows, [](const Row& row) { return !row.absent.empty(); });
    print_pass(out, rows, told);
    summary.push_back(winners_json(rows));
  }
  out.say("\n");
  print_ceiling(out, result.ceilings, result.rows);
  print_peaks(out, result.before, result.after);
  print_warnings(out, result.rows);
  print_disturbance(out, result.disturbance, result.rows);
  if (const std::string absent = flags.names.empty() ? absent_line(result.rows) : std::string(); !absent.empty()) out.say(printable(absent, 600), 2);
  print_conclusion(out, result.rows);
  if (!problem.json().empty()) {
    Record record{"compare", repeating_flags(flags), result.before, result.after, result.rows, summary};
    record.disturbance = to_json(result.disturbance, result.rows);
    write_json(to_json(record), problem.json());
  }
  return exit_code_of(result.rows);
}

}  // namespace

void add_compare(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("compare", "Race the library against standard attention and other implementations");
  auto flags = std::make_shared<CompareFlags>();
  flags->problem.add_to(*command);
  command->remove_option(command->get_option("--algorithm"));
  command
      ->add_option("--algorithm", flags->problem.target.algorithm,
                   "Of the contestant fattn; several with commas: these side by side (standard,v1,v2,v3), and what --provider names")
      ->check(CLI::Validator(not_algorithms, ""))
      ->type_name("NAME,...")
      ->capture_default_str();
  command
      ->add_option(
          "--provider", flags->names,
          "A contestant: fattn, one of its algorithms (standard, v1, v2, v3), or a provider as NAME or NAME:VARIANT; may be repeated [fattn, "
          "standard and all providers, each with its first variant]")
      ->type_name("NAME");
  flags->providers.add_to(*command);
  command
      ->add_option("--time-limit", flags->time_limit,
                   "Seconds for all of it: a provider that is not ready in time has a row that says so, and the others are timed, with fewer samples "
                   "if need be [none]")
      ->check(number(1, 86400));
  flags->output.add_to(*command);
  command->footer(
      "All compute the same inputs in the same dtype, are checked against the float64 oracle, and take turns, so that a drift of the machine hits "
      "all. \"undecided\": the 95 % intervals of the medians overlap. A contestant that cannot run has a row with the reason.\n"
      "extra memory: the peak that the call adds over q, k, v (and dout), outputs included. moved (model): bytes between a GPU's memory and its "
      "multiprocessors, or a core's L2 cache and the rest, counted from the algorithm and its tiles, not measured (docs/RECORD.md).\n"
      "Exit 1 if a check fails, 2 if nothing could run.\n\n"
      "Examples:\n"
      "  fattn compare --preset gpt2-small --algorithm standard,v1,v2\n"
      "  fattn compare --device cuda --algorithm standard,v1,v2,v3 --batch 4 --nheads 16 --seqlen 4096 --causal\n"
      "  fattn compare --seqlen 2048 --dtype bf16 --python venv/bin/python --provider fattn --provider torch-sdpa:flash");
  command->callback([flags, &exit_code] {
    take_algorithms(*flags);
    exit_code = compare(*flags);
  });
}

}  // namespace fattn::cli
