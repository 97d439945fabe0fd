// No attention is computed and none of its tensors allocated: plans, counts, and what a calibration measured.
#include "cli/memory.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "cli/json_output.h"
#include "cli/memory_words.h"
#include "cli/output.h"
#include "cli/problem_flags.h"
#include "cli/progress.h"
#include "cli/sanitize.h"
#include "cli/terminal.h"
#include "cli/usage_error.h"
#include "cli/values.h"
#include "cli/whole_file.h"
#include "lab/memory/report.h"

namespace fattn::cli {
namespace {

const std::vector<std::string> kNames = {"standard", "v1", "v2", "v3"};

struct MemoryFlags {
  ProblemFlags problem;
  std::vector<std::string> algorithms = kNames;
  std::string json, figure;
  bool explain = false;
  OutputFlags output;
};

// What the counts of loops know.
void require_counted(const measure::ProblemSpec& s) {
  if (s.windowed() || s.has_terms() || s.softcap != 0)
    throw CLI::ValidationError("memory", "counts loops over dense tensors, causal or not; leave out" + measure::describe_options(s));
  if (s.dtype == DType::kF64)
    throw CLI::ValidationError("--dtype", "fp64 runs on the reference alone, which has no blocks to count; allowed: fp32, bf16, fp16");
}

int run(const MemoryFlags& flags) {
  const measure::ProblemSpec spec = flags.problem.spec();
  require_counted(spec);
  measure::cost_of(spec, measure::Pass::kForward);  // refuses what is no problem, before anything is printed
  require_writable(flags.json);
  require_writable(flags.figure);
  std::vector<std::string> algorithms;
  for (const std::string& name : flags.algorithms)
    if (std::find(algorithms.begin(), algorithms.end(), name) == algorithms.end()) algorithms.push_back(name);
  const lab::MemoryMachine machine = lab::memory_machine(flags.problem.target.device);
  Progress progress("planning", static_cast<int64_t>(algorithms.size()));
  const lab::MemoryReport report = lab::memory_report(spec, flags.problem.grad(), algorithms, machine, [&progress] { progress.step(); });
  progress.wipe();
  Output out(flags.output, flags.json);
  print_report(out, report);
  if (flags.explain) print_arithmetic(out, report);
  if (is_terminal(out.words()) && !out.for_programs()) print_rooflines(out, report, width_of(out.words()), shows_colour(out.words()));
  if (!flags.figure.empty()) {
    const std::string svg = lab::chart::to_svg(lab::memory_figure(report));
    WholeFile file(flags.figure);
    file.write(svg.data(), svg.size());
    file.publish();
    out.say("Drawn: " + printable(flags.figure));
  }
  if (!flags.json.empty()) write_json(lab::to_json(report), flags.json);
  if (!flags.explain) out.say("--explain shows the arithmetic behind every number.");
  return kExitFine;
}

}  // namespace

void add_memory(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("memory", "What attention moves and where, which limit binds, and the memory of a training step");
  auto flags = std::make_shared<MemoryFlags>();
  flags->problem.add_problem_to(*command);
  command->option_defaults()->group("Where and how");
  add_device(*command, flags->problem.target.device);
  command->add_option("--algorithm", flags->algorithms, "Which to count, one or several")
      ->delimiter(',')
      ->transform(one_of(kNames))
      ->type_name("NAME,...")
      ->default_str("standard,v1,v2,v3");
  command->option_defaults()->group("Output");
  command->add_flag("--explain", flags->explain, "The line of arithmetic behind every number, and the models in words");
  command->add_option("--figure", flags->figure, "Draw bytes moved and rooflines as SVG")->check(svg_name())->type_name("FILE.svg");
  command->add_option("--json", flags->json, "Write the record (docs/RECORD.md) to a file, or - for stdout")->type_name("FILE|-");
  command->option_defaults()->group("Options");
  flags->output.add_to(*command);
  command->footer(
      "Counts loops; measures nothing. Rates, limits and rooflines need this machine's calibration (`fattn calibrate`, once). `at least` is the time "
      "that the limit takes alone, a lower bound: `fattn bench` measures the time itself.\n\nFor example:\n  fattn memory --preset gpt2-small\n  "
      "fattn "
      "memory --seqlen 4096 --causal --explain\n  fattn memory --seqlen 4096 --figure memory.svg");
  command->callback([flags, &exit_code] { exit_code = run(*flags); });
}

}  // namespace fattn::cli
