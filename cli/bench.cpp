// One contestant, checked first, then timed.
#include "cli/bench.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <memory>
#include <optional>

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
#include "cli/suite.h"
#include "cli/table.h"
#include "cli/usage_error.h"
#include "cli/values.h"
#include "fattn/plan.hpp"
#include "measure/library_plans.h"

namespace fattn::cli {
namespace {

using namespace measure;

struct BenchFlags {
  ProblemFlags problem;
  ProviderFlags providers;
  OutputFlags output;
  std::string suite, only, status;
  bool quick = false, explain = false;
};

void explain(const Output& out, const ProblemSpec& spec, bool grad, Options options, const Placement& place) {
  spec.apply_to(options);
  const auto print = [&](const char* pass, const Plan& plan) {
    const fattn_plan_info info = plan.info();
    out.say(fmt::format("plan {}: {}", pass, printable(info.kernel)), 10);
    out.say(fmt::format("          {}\n          workspace {}", printable(info.why), bytes_text(static_cast<double>(info.workspace_bytes))));
  };
  try {
    print("fwd", Plan(forward_tensors(spec, place), options));
    if (grad) print("bwd", Plan(backward_tensors(spec, place), options));
  } catch (const Error& error) {
    out.say("no plan: " + printable(error.what(), 600), 2);
  }
}

void print(Output& out, const ProblemSpec& spec, const RaceResult& result) {
  const Row& first = result.rows.front();
  out.say(
      fmt::format("{}: backend {}, algorithm {}, {}", describe(spec), first.who.backend, first.who.algorithm,
                  first.who.device == "cpu" ? fmt::format("{} thread{}", first.who.threads, first.who.threads == 1 ? "" : "s") : first.who.device),
      2);
  const std::string kernels = first.who.kernel(Pass::kForwardBackward);
  if (!kernels.empty()) out.say("kernel: " + printable(kernels), 2);
  Table checks({Column::text("tensor").as_key(), Column::number("error"), Column::number("allowed"), Column::text("verdict"),
                Column::text("compared with the float64 oracle").wrapping(20)},
               "Checked before it was timed");
  for (const Row& row : result.rows)
    if (row.pass != Pass::kForwardBackward)
      for (const TensorCheck& c : row.checks)
        checks.add(
            {c.tensor, short_cell(c.error), short_cell(c.allowed), c.pass ? Cell("ok").in(Mood::kGood) : Cell("FAILED").in(Mood::kBad), c.where});
  if (!checks.rows().empty()) out.print(checks);
  Table table(
      {Column::text("pass").as_key(), Column::number("median", "s"), Column::number("95 % interval").ranked(3), Column::number("min", "s").ranked(6),
       Column::number("mean", "s").ranked(7), Column::number("max", "s").ranked(5), Column::number("stddev", "s").ranked(4),
       Column::number("samples").ranked(8), Column::number("GFLOP/s"), Column::number("nominal").ranked(9), Column::number("of peak").ranked(2),
       Column::number("of ceiling").if_any(), Column::text("rating").if_any(), Column::text("limit").ranked(1).if_any(),
       Column::number("of read rate").ranked(2).if_any(), Column::number("extra memory", "bytes").ranked(1)},
      "Time");
  for (const Row& row : result.rows) {
    if (!row.ok() || !row.time) {
      table.add({name_of(row.pass), Cell(name_of(row.status)).in(Mood::kBad)});
      table.note(status_text(row));
      continue;
    }
    const Statistics& t = *row.time;
    table.add({name_of(row.pass), seconds_cell(t.median), interval_cell(t), seconds_cell(t.min), seconds_cell(t.mean), seconds_cell(t.max),
               seconds_cell(t.stddev), count_cell(t.samples), giga_cell(*row.flops_per_s), giga_cell(*row.flops_nominal_per_s),
               row.peak_fraction ? percent_cell(*row.peak_fraction) : "", row.ceiling ? percent_cell(row.ceiling->fraction) : "",
               row.ceiling ? rating_cell(row.ceiling->rating) : "", row.ceiling ? row.ceiling->limit : "",
               row.bandwidth_fraction ? percent_cell(*row.bandwidth_fraction) : "", bytes_cell(static_cast<double>(row.memory->extra_bytes))});
  }
  out.print(table);
  for (const Row& row : result.rows)
    if (row.gpu.sm_clock_mhz || row.gpu.power_w)
      out.say(fmt::format("{} ran at{}{}", name_of(row.pass), row.gpu.sm_clock_mhz ? fmt::format(" {:.0f} MHz", *row.gpu.sm_clock_mhz) : "",
                          row.gpu.power_w ? fmt::format("{} {:.0f} W", row.gpu.sm_clock_mhz ? "," : "", *row.gpu.power_w) : ""));
  out.say(
      "\nGFLOP/s count the visible (query, key) pairs; nominal counts all of them, halved if causal. extra memory: outputs and workspace. Passes: "
      "fwd is forward, bwd backward, fwdbwd both.");
  print_ceiling(out, result.ceilings, result.rows);
  print_peaks(out, result.before, result.after);
  if (first.peak_fraction) out.say("of peak: of " + first.peak_name);
  print_warnings(out, result.rows);
  print_disturbance(out, result.disturbance, result.rows);
}

int bench_one(const BenchFlags& flags) {
  const ProblemFlags& problem = flags.problem;
  require_writable(problem.json());
  const ProblemSpec spec = problem.spec();
  RaceOptions options = race_options(problem, spec);
  measure_reads(options, spec);
  const Options& library = options.library;

  const std::unique_ptr<Contestant> contestant =
      make_library_contestant(library.algorithm == Algorithm::kStandard ? "standard" : "fattn", library, options.place);
  RaceResult result;
  {
    Kept kept(problem.json());
    options.keep = [&](const RaceResult& so_far, const std::string& what) {
      kept.keep({"bench", problem.repeating_flags(), so_far.before, so_far.after, so_far.rows, nullptr}, what);
    };
    Progress progress("bench");
    options.progress = &progress;
    result = race(spec, {contestant.get()}, options);
  }
  for (Row& row : result.rows) row.speedup_over_standard.reset();  // nothing was compared
  Output out(flags.output, problem.json());
  if (flags.explain) explain(out, spec, options.grad, library, options.place);
  print(out, spec, result);
  if (!problem.json().empty()) {
    Record record{"bench", problem.repeating_flags(), result.before, result.after, result.rows, nullptr};
    record.disturbance = to_json(result.disturbance, result.rows);
    write_json(to_json(record), problem.json());
  }
  return exit_code_of(result.rows);
}

}  // namespace

void add_bench(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("bench", "Time one problem: rate, share of this machine's peak, memory");
  auto flags = std::make_shared<BenchFlags>();
  flags->problem.add_to(*command);
  command
      ->add_option(
          "--suite", flags->suite,
          "Instead of one problem: cpu, cuda: the speed table of a device, against providers that are there; prices: what every option costs")
      ->transform(one_of({"cpu", "cuda", "prices"}))
      ->type_name("NAME");
  command->add_flag("--quick", flags->quick, "Suite: fewer sizes and samples")->needs("--suite");
  command->add_option("--only", flags->only, "Suite: the parts alone that have this text in their title, e.g. 'bf16'")
      ->needs("--suite")
      ->check([](const std::string& text) { return std::string(text.empty() ? "is empty; leave it out for all parts" : ""); })
      ->type_name("TEXT");
  command->add_option("--status", flags->status, "Suite: a file that says what is being done while it runs (docs/RECORD.md); `fattn watch` shows it")
      ->needs("--suite")
      ->type_name("FILE");
  command->add_flag("--explain", flags->explain, "Print the plan of every pass and why it was chosen");
  flags->providers.add_to(*command);
  flags->output.add_to(*command);
  command->footer(
      "The result is checked against the float64 oracle before anything is timed (large problems: in samples); exit 1 if it fails, or if a time "
      "cannot be true for the shape. Exit 2 if the problem needs more memory than there is.\n"
      "Passes: fwd, bwd (alone), fwdbwd. The peak is measured in the same run, before and after, with the same threads.\n"
      "A suite has problems and samples of its own and takes the flags that say where and how: --no-grad and those from --device to --warm-l2, "
      "--patience, --memory-limit and those of providers.\n\n"
      "Examples:\n"
      "  fattn bench --preset gpt2-small\n"
      "  fattn bench --seqlen 4096 --nheads 32 --nheads-k 8 --headdim 128 --causal --dtype bf16 --no-grad\n"
      "  fattn bench --seqlen 2048 --dropout 0.1 --bias heads --dbias\n"
      "  fattn bench --suite cpu --json results.json\n"
      "  fattn bench --suite prices --device cuda");
  command->callback([flags, &exit_code] {
    if (flags->suite.empty()) {
      exit_code = bench_one(*flags);
      return;
    }
    const std::string alone = flags->explain ? "--explain" : flags->problem.first_of_one_problem();
    if (!alone.empty()) throw CLI::ValidationError(alone, "a suite has problems and samples of its own; leave it out, or leave --suite out");
    // --suite cuda is --device cuda.
    if (flags->suite == "cuda" && !flags->problem.target.on_cuda()) flags->problem.target.device = "cuda";
    if (flags->suite == "cpu" && flags->problem.target.on_cuda())
      throw CLI::ValidationError("--suite", "the cpu suite runs on --device cpu; ask for --suite cuda");
    const ProblemFlags& problem = flags->problem;
    const SuiteOptions suite{flags->suite,   flags->quick,           problem.grad(),     flags->only,           problem.options(), problem.place(),
                             problem.json(), problem.memory_limit(), problem.patience(), problem.place_flags(), flags->output,     flags->status};
    exit_code = flags->suite == "prices" ? run_prices(suite) : run_suite(suite, flags->providers);
  });
}

}  // namespace fattn::cli
