// The conductor of a sweep. Everything that is shown is made from the record, so that one that is read again shows the same.
#include "cli/sweep.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <tuple>

#include "cli/json_output.h"
#include "cli/kept.h"
#include "cli/output.h"
#include "cli/progress.h"
#include "cli/race.h"
#include "cli/report.h"
#include "cli/sanitize.h"
#include "cli/schedule.h"
#include "cli/status_file.h"
#include "cli/sweep_flags.h"
#include "cli/sweep_plan.h"
#include "cli/sweep_tables.h"
#include "cli/usage_error.h"
#include "cli/whole_file.h"
#include "fattn/system.hpp"
#include "lab/sweep/figures.h"
#include "lab/sweep/resume.h"
#include "lab/sweep/sweep.h"
#include "measure/environment.h"

namespace fattn::cli {
namespace {

using namespace measure;
using nlohmann::ordered_json;

constexpr double kSweepOracleFlops = 5e7;  // a problem

// Rows as JSON, by value, pass and contestant.
class SweepRows {
 public:
  explicit SweepRows(const SweepSetup& setup) : setup_(setup) {}

  void put(ordered_json row, int64_t value, const std::string& contestant) {
    row["value"] = value;
    row["contestant"] = contestant;
    const std::string pass = row.at("pass").get<std::string>();
    rows_[{value, pass, contestant}] = std::move(row);
  }
  bool has(int64_t value, const std::string& pass, const std::string& contestant) const { return rows_.count({value, pass, contestant}) > 0; }
  void erase(int64_t value, const std::string& pass, const std::string& contestant) { rows_.erase({value, pass, contestant}); }

  ordered_json in_order() const {
    ordered_json all = ordered_json::array();
    for (const int64_t value : setup_.values)
      for (const Pass pass : setup_.passes)
        for (const std::string& contestant : setup_.contestants)
          if (const auto row = rows_.find({value, name_of(pass), contestant}); row != rows_.end()) all.push_back(row->second);
    lab::add_comparisons(all, setup_.baseline);
    return all;
  }

 private:
  const SweepSetup& setup_;
  std::map<std::tuple<int64_t, std::string, std::string>, ordered_json> rows_;
};

std::string worst_status(const ordered_json& rows) {
  const auto rank = [](const std::string& s) { return s == "check_failed" ? 3 : s == "refused" ? 2 : s == "ok" ? 0 : 1; };
  std::string worst = "ok";
  for (const ordered_json& row : rows)
    if (const std::string status = row.at("status"); rank(status) > rank(worst)) worst = status;
  return worst;
}

std::string device_words(const Placement& place, const ordered_json& environment, int threads, bool threads_swept) {
  if (place.device == Device::kCuda) {
    if (const auto gpus = environment.find("gpus"); gpus != environment.end())
      for (const ordered_json& gpu : *gpus)
        if (gpu.at("device") == place.name()) return gpu.at("name").get<std::string>();
    return place.name();
  }
  std::string words = environment.at("cpu").at("model").get<std::string>();
  if (words.empty()) words = "CPU";
  const int used = threads > 0 ? threads : cpu_info().usable_threads;
  return threads_swept ? words : fmt::format("{}, {} thread{}", words, used, used == 1 ? "" : "s");
}

// What is known of a sweep but its rows.
struct SweepFrame {
  ordered_json environment, peaks_before = nullptr, peaks_after = nullptr, disturbance = nullptr;
  std::string device;
};

ordered_json record_of(const SweepSetup& setup, const SweepFrame& frame, ordered_json rows, bool complete) {
  std::vector<std::string> passes;
  for (const Pass pass : setup.passes) passes.emplace_back(name_of(pass));
  const auto or_null = [](const std::string& text) { return text.empty() ? ordered_json(nullptr) : ordered_json(text); };
  ordered_json record = {{"fattn_sweep", lab::kSweepVersion},
                         {"command", "sweep"},
                         {"flags", setup.flags},
                         {"status", worst_status(rows)},
                         {"complete", complete},
                         {"environment", frame.environment},
                         {"sweep",
                          {{"preset", setup.preset ? ordered_json(setup.preset->name) : ordered_json(nullptr)},
                           {"over", name_of(setup.axis)},
                           {"values", setup.values},
                           {"fix", or_null(setup.fix)},
                           {"passes", passes},
                           {"contestants", setup.contestants},
                           {"baseline", or_null(setup.baseline)},
                           {"problem", describe_without(setup.axis, setup.fix, setup.base, setup.embed)},
                           {"device", frame.device}}},
                         {"peaks", {{"before", frame.peaks_before}, {"after", frame.peaks_after}}},
                         {"disturbance", frame.disturbance}};
  record["rows"] = std::move(rows);
  const lab::Sweep sweep = lab::read_sweep(record);
  record["fits"] = lab::to_json(lab::growth_of(sweep));
  record["findings"] = lab::findings(sweep);
  return record;
}

// The earlier record, or nothing where there need be none.
std::optional<ordered_json> earlier_record(const SweepSetup& setup) {
  if (setup.resume_from.empty()) return std::nullopt;
  std::ifstream file(setup.resume_from, std::ios::binary);
  if (!file) {
    if (!setup.resume_must_exist) return std::nullopt;
    throw std::runtime_error("'" + printable(setup.resume_from) + "' cannot be read; name the record of an earlier sweep, or leave --resume out");
  }
  std::ostringstream content;
  content << file.rdbuf();
  ordered_json record = ordered_json::parse(content.str(), nullptr, false);
  if (record.is_discarded())
    throw std::runtime_error("'" + printable(setup.resume_from) +
                             "' is no JSON, or a part of it is missing; nothing was measured and nothing changed");
  return record;
}

// Its rows that are ok, and what was found beside them.
void take_over(const ordered_json& record, const SweepSetup& setup, SweepFrame& frame, SweepRows& rows) {
  try {
    for (const ordered_json& row :
         lab::rows_to_resume(record, setup.flags, frame.environment, {"--values", "--patience", "--memory-limit", "--timeout"}))
      rows.put(row, row.at("value").get<int64_t>(), row.at("contestant").get<std::string>());
    frame.peaks_before = record.at("peaks").at("before");
    frame.peaks_after = record.at("peaks").at("after");
    frame.disturbance = record.at("disturbance");
  } catch (const nlohmann::json::exception&) {
    throw std::runtime_error("'" + printable(setup.resume_from) + "' is no whole record of a sweep: 'peaks', 'disturbance' or a row lacks something");
  } catch (const std::exception& e) {
    throw std::runtime_error("--resume from '" + printable(setup.resume_from) + "' is not possible: " + e.what());
  }
}

std::vector<PlannedStep> plan_steps(const SweepSetup& setup, SweepRows& rows) {
  std::vector<PlannedStep> steps;
  for (const lab::Step& step : setup.steps) {
    PlannedStep planned{step, std::nullopt, std::vector<PlannedStep::Entry>(setup.contestants.size())};
    try {
      for (const Pass pass : setup.passes) cost_of(step.spec, pass);
    } catch (const std::exception& e) {
      planned.impossible = as_failure(e);
      if (planned.impossible->status() == Status::kFailed) planned.impossible = Failure(Status::kUnsupported, e.what());
    }
    for (size_t c = 0; c < setup.contestants.size(); ++c) {
      const std::string& name = setup.contestants[c];
      const auto has = [&](Pass pass) { return rows.has(step.value, name_of(pass), name); };
      planned.entries[c].wanted = !std::all_of(setup.passes.begin(), setup.passes.end(), has);
      // Passes of a contestant are measured together.
      if (planned.entries[c].wanted)
        for (const Pass pass : setup.passes) rows.erase(step.value, name_of(pass), name);
    }
    steps.push_back(std::move(planned));
  }
  return steps;
}

void put_failure(SweepRows& rows, const SweepSetup& setup, const PlannedStep& step, const Contestant& contestant, const std::string& name,
                 const Failure& failure) {
  for (const Pass pass : setup.passes) {
    Row row;
    row.spec = step.step.spec;
    row.pass = pass;
    row.who = contestant.identity();
    if (!step.impossible) row.cost = cost_of(row.spec, pass);
    row.fail(failure);
    rows.put(to_json(row), step.step.value, name);
  }
}

// What was measured beside rows, for the words below the tables.
struct Measured {
  std::vector<Row> rows;
  Peaks first, last;
  Disturbance disturbance;
  lab::CeilingRates ceilings;

  void add(const RaceResult& result) {
    ceilings = result.ceilings;
    if (first.fma.rate == 0) first = result.before;
    if (result.after.fma.rate > 0 || last.fma.rate == 0) last = result.after;
    disturbance.add(result.disturbance);
    rows.insert(rows.end(), result.rows.begin(), result.rows.end());
  }
};

// The share of a step's time that is over when so many of its passes are.
double share_done(const std::vector<Pass>& passes, size_t done) {
  constexpr double kSamples = 0.8;  // the rest: inputs, check, memory
  const auto weight = [](Pass pass) { return pass == Pass::kForward ? 1.0 : pass == Pass::kBackward ? 2.5 : 3.5; };
  double all = 0, over = 0;
  for (size_t p = 0; p < passes.size(); ++p) all += weight(passes[p]), over += p < done ? weight(passes[p]) : 0;
  return 1 - kSamples + kSamples * over / all;
}

void write_text(const std::string& text, const std::string& path) {
  WholeFile file(path);
  file.write(text.data(), text.size());
  file.publish();
}

// Returns the files.
std::vector<std::string> draw(const lab::Sweep& sweep, const std::string& target) {
  std::vector<std::string> files;
  if (target.empty()) return files;
  if (target.ends_with(".svg")) {
    write_text(lab::chart::to_svg(figure_of(sweep, sweep.passes)), target);
    files.push_back(target);
  } else {
    std::filesystem::create_directories(target);
    const bool once = sweep.axis == lab::SweepAxis::kCausal;
    for (const std::string& pass : sweep.passes) {
      files.push_back((std::filesystem::path(target) / fmt::format("sweep-{}{}.svg", name_of(sweep.axis), once ? "" : "-" + pass)).string());
      write_text(lab::chart::to_svg(figure_of(sweep, once ? sweep.passes : std::vector<std::string>{pass})), files.back());
      if (once) break;
    }
  }
  return files;
}

int exit_code_of_sweep(const lab::Sweep& sweep) {
  const auto any = [&](auto&& of) { return std::any_of(sweep.cells.begin(), sweep.cells.end(), of); };
  if (any([](const lab::Cell& c) { return c.status == "check_failed" || c.status == "refused"; })) return kExitCheckFailed;
  return any([](const lab::Cell& c) { return c.ok(); }) ? kExitFine : kExitBadInput;
}

int run_sweep(SweepFlags& flags) {
  const SweepSetup setup = set_up(flags);
  const std::string json = flags.problem.json();
  require_writable(json);
  if (flags.figure.ends_with(".svg")) require_writable(flags.figure);
  require_writable(flags.status);
  const std::optional<ordered_json> earlier = earlier_record(setup);

  RaceOptions options;
  options.grad = setup.grad();
  options.passes = setup.passes;
  options.sampling = flags.problem.sampling();
  options.memory_limit = flags.problem.memory_limit();
  options.oracle_flops = kSweepOracleFlops;
  options.place = flags.problem.place();
  options.part_of_suite = true;
  const Options library = flags.problem.options();
  SweepContestants contestants(setup.contestants, library, options.place, flags.providers);
  contestants.with_threads(setup.steps.front().threads);  // refuses names that nobody has

  SweepFrame frame;
  frame.environment = measure::environment();
  frame.device = device_words(options.place, frame.environment, library.num_threads, setup.axis == lab::SweepAxis::kThreads);
  SweepRows rows(setup);
  if (earlier) take_over(*earlier, setup, frame, rows);
  std::vector<PlannedStep> steps = plan_steps(setup, rows);
  const bool anything = std::any_of(steps.begin(), steps.end(), [](const PlannedStep& step) { return step.anything(); });

  Measured measured;
  {
    Kept kept(json);
    Progress progress("sweep");
    if (anything && options.place.device == Device::kCpu)
      options.read_bytes_per_s = measure_read_bandwidth(library.num_threads > 0 ? library.num_threads : cpu_info().usable_threads, options.pains());
    options.library = library;
    estimate_steps(steps, contestants, options);
    heed_patience(steps, flags.problem.patience());
    double seconds = 0;
    for (const PlannedStep& step : steps) seconds += step.seconds();
    progress.expect(seconds > 0 ? seconds : static_cast<double>(steps.size()), seconds > 0);
    if (seconds >= kWorthSaying) progress.say("about " + duration_in_words(seconds));
    const auto status = std::make_shared<StatusFile>(flags.status, "sweep", static_cast<int64_t>(steps.size()), seconds);
    kept.before_end([status] { status->end("interrupted"); });

    for (size_t i = 0; i < steps.size(); ++i) {
      const PlannedStep& planned = steps[i];
      const int64_t value = planned.step.value;
      const std::vector<Contestant*> all = contestants.with_threads(planned.step.threads);
      std::vector<Contestant*> racing;
      std::vector<std::string> names;
      for (size_t c = 0; c < all.size(); ++c) {
        const PlannedStep::Entry& entry = planned.entries[c];
        if (!entry.wanted) continue;
        if (planned.impossible || !entry.too_long.empty()) {
          put_failure(rows, setup, planned, *all[c], setup.contestants[c],
                      planned.impossible ? *planned.impossible : Failure(Status::kTimeout, entry.too_long));
          continue;
        }
        racing.push_back(all[c]);
        names.push_back(setup.contestants[c]);
      }
      double stepped = 0;
      if (!racing.empty()) {
        status->now(fmt::format("{} {}: {}", name_of(setup.axis), text_of_value(setup.axis, value), fmt::join(names, ", ")));
        const auto put = [&](const RaceResult& result) {
          for (size_t r = 0; r < result.rows.size(); ++r) rows.put(to_json(result.rows[r]), value, names[r % names.size()]);
        };
        size_t passes_done = 0;
        options.library = contestants.options(planned.step.threads);
        options.keep = [&](const RaceResult& so_far, const std::string&) {
          put(so_far);
          frame.peaks_before = to_json(measured.first.fma.rate > 0 ? measured.first : so_far.before);
          kept.keep([record = record_of(setup, frame, rows.in_order(), false)] { return record; },
                    fmt::format("{} of {} values and a part of the next", i, steps.size()));
          if (++passes_done == setup.passes.size()) return;  // the last is told below
          const double share = planned.seconds() * share_done(setup.passes, passes_done) - stepped;
          if (share <= 0) return;
          progress.step(share);
          status->progress(share);
          stepped += share;
        };
        const RaceResult result = race(planned.step.spec, racing, options);
        put(result);
        measured.add(result);
      }
      const double rest = seconds > 0 ? planned.seconds() - stepped : 1;
      progress.step(rest);
      status->step(rest);
      if (!measured.rows.empty()) {
        frame.peaks_before = to_json(measured.first);
        frame.peaks_after = to_json(measured.last);
        frame.disturbance = to_json(measured.disturbance, measured.rows);
      }
      const ordered_json so_far = record_of(setup, frame, rows.in_order(), false);
      kept.keep([so_far] { return so_far; }, fmt::format("{} of {} values", i + 1, steps.size()));
      // A file has what was measured so far, should the program be killed.
      if (!json.empty() && json != "-" && !racing.empty() && i + 1 < steps.size()) write_json(so_far, json);
    }
    status->end("done");
  }

  const ordered_json record = record_of(setup, frame, rows.in_order(), true);
  const lab::Sweep sweep = lab::read_sweep(record);
  // First of all, should the reader of the words below not read to their end.
  if (!json.empty()) write_json(record, json);
  const std::vector<std::string> figures = draw(sweep, flags.figure);
  Output out(flags.output, json);
  out.say(printable(fmt::format("sweep over {} of {}, on {}: checked against the float64 oracle, then timed in turns", name_of(setup.axis),
                                sweep.problem, sweep.device)),
          2);
  print_sweep(out, sweep);
  out.say("\n" + out.in(Mood::kTitle, "Found"));
  for (const std::string& finding : lab::findings(sweep)) out.say("  " + printable(finding, 600), 2);
  if (setup.baseline.empty()) out.say("  Without " + printable(flags.baseline, 40) + " among the contestants there is no speed-up.", 2);
  out.say("\n");
  print_ceiling(out, measured.ceilings, measured.rows);
  print_peaks(out, measured.first, measured.last);
  print_warnings(out, measured.rows);
  print_disturbance(out, measured.disturbance, measured.rows);
  for (const std::string& file : figures) out.say("figure: " + printable(file), 8);
  return exit_code_of_sweep(sweep);
}

}  // namespace

void add_sweep(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("sweep", "Measure how time and memory change with a size; tables, figures, exponents");
  auto flags = std::make_shared<SweepFlags>();
  flags->add_to(*command);
  command->footer(
      "At every value all contestants compute the same inputs, are checked against the float64 oracle, and take turns. One that has no memory, "
      "cannot "
      "compute the problem, or would take longer than --patience leaves (of which the sweep takes no more in all) has a row with the reason.\n"
      "extra memory: the peak that a call adds over its inputs, outputs included. vs: times as fast as the baseline. of its memory: the share of the "
      "baseline's extra memory. With --json FILE the record is written after every value, so that --resume goes on where something ended.\n"
      "Exit 1 if a check fails, 2 if nothing could run.\n\n"
      "Examples:\n"
      "  fattn sweep --preset ci --figure sweep.svg\n"
      "  fattn sweep --over seqlen --from 256 --to 8192 --nheads 8 --causal --json sweep.json --resume\n"
      "  fattn sweep --over nheads --values 8,16,32 --embed 2048 --pass fwd,fwdbwd\n"
      "  fattn sweep --preset gpt2-medium --device cuda --figure figures");
  command->callback([flags, &exit_code] { exit_code = run_sweep(*flags); });
}

}  // namespace fattn::cli
