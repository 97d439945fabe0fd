// The conductor of a profile: times first, without a profiler beside; then recorded calls, then counted ones; then the folder.
#include "cli/profile.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <map>
#include <memory>
#include <utility>

#include "cli/contestants.h"
#include "cli/json_output.h"
#include "cli/kept.h"
#include "cli/oracle_check.h"
#include "cli/output.h"
#include "cli/problem_flags.h"
#include "cli/profile_folder.h"
#include "cli/profile_program.h"
#include "cli/profile_tools.h"
#include "cli/progress.h"
#include "cli/race.h"
#include "cli/race_flags.h"
#include "cli/report.h"
#include "cli/sanitize.h"
#include "cli/status_file.h"
#include "cli/usage_error.h"
#include "cli/values.h"
#include "fattn/device.hpp"
#include "lab/profile/attention.h"
#include "lab/profile/cupti_here.h"
#include "lab/profile/program.h"
#include "lab/profile/recorder.h"
#include "measure/environment.h"

namespace fattn::cli {
namespace {

using namespace measure;
using lab::profile::Profile;

const std::map<std::string, lab::profile::SortBy> kSorts = {{"time", lab::profile::SortBy::kTime},     {"times", lab::profile::SortBy::kTimes},
                                                            {"flops", lab::profile::SortBy::kFlops},   {"bytes", lab::profile::SortBy::kBytes},
                                                            {"memory", lab::profile::SortBy::kMemory}, {"name", lab::profile::SortBy::kName}};
const char* const kPrograms = "PROGRAM";

struct ProfileFlags {
  ProblemFlags problem;
  OutputFlags output;
  std::vector<std::string> program;
  std::string out = "fattn-profile", sort = "time", status, from;
  int calls = 3;
  int64_t top = 20;
  bool nsight = false, no_nsight = false;
};

std::vector<std::string> repeating_flags(const ProfileFlags& flags) {
  std::vector<std::string> all = {"--out", printable(flags.out)};
  if (flags.sort != "time") all.insert(all.end(), {"--sort", flags.sort});
  if (!flags.program.empty()) {
    all.emplace_back("--");
    for (const std::string& word : flags.program) all.push_back(printable(word));
    return all;
  }
  for (std::string& flag : flags.problem.repeating_flags()) all.push_back(printable(flag));
  all.insert(all.end(), {"--calls", std::to_string(flags.calls)});
  return all;
}

NamedRecords records_of(const ProfileFlags& flags, const RaceResult& race, bool complete) {
  NamedRecords records;
  std::map<std::string, std::vector<Row>> by_pass;
  std::vector<Row> standard;
  for (const Row& row : race.rows) {
    by_pass[name_of(row.pass)].push_back(row);
    if (row.who.provider == "standard") standard.push_back(row);
  }
  const auto add = [&](const char* name, const char* command, const std::vector<Row>& rows, nlohmann::ordered_json summary,
                       std::vector<std::string> more) {
    Record record{command, flags.problem.repeating_flags(), race.before, race.after, rows, std::move(summary)};
    record.flags.insert(record.flags.end(), more.begin(), more.end());
    for (std::string& flag : record.flags) flag = printable(flag);
    record.complete = complete;
    record.disturbance = to_json(race.disturbance, rows);
    records.emplace_back(name, to_json(record));
  };
  if (race.rows.empty()) return records;
  nlohmann::ordered_json summary = nlohmann::ordered_json::array();
  for (const auto& [pass, rows] : by_pass) summary.push_back(winners_json(rows));
  add("baseline.json", "bench", standard, nullptr, {"--algorithm", "standard"});
  add("comparison.json", "compare", race.rows, std::move(summary), {"--provider", "fattn", "--provider", "standard"});
  return records;
}

nlohmann::ordered_json gpu_json(int device) {
  const fattn_cuda_info gpu = cuda::info(device);
  return {{"name", gpu.name},
          {"index", gpu.index},
          {"capability", fmt::format("{}.{}", gpu.capability_major, gpu.capability_minor)},
          {"multiprocessors", gpu.multiprocessors},
          {"clock_khz", gpu.clock_khz},
          {"memory_clock_khz", gpu.memory_clock_khz},
          {"memory_bus_bits", gpu.memory_bus_bits},
          {"memory_bytes", gpu.memory_bytes},
          {"l2_bytes", gpu.l2_bytes},
          {"shared_per_block", gpu.shared_per_block},
          {"driver_version", gpu.driver_version}};
}

// All that was measured so far, for who interrupts and for the end.
struct SoFar {
  Profile profile;
  RaceResult race;
};

int run_on_attention(const ProfileFlags& flags) {
  const ProblemFlags& problem = flags.problem;
  const ProblemSpec spec = problem.spec();
  if (spec.dtype == DType::kF64)
    throw CLI::ValidationError("--dtype", "fp64 runs on the reference alone, which is no kernel to profile; allowed: fp32, bf16, fp16");
  cost_of(spec, Pass::kForward);
  require_writable(problem.json());
  require_writable(flags.status);
  require_memory(spec.input_bytes(problem.grad()), problem.memory_limit(), "the input of " + describe(spec));
  const Placement place = problem.place();
  const lab::MemoryMachine machine = lab::memory_machine(place.name());  // no such device: nothing is made
  const ProfileFolder folder(flags.out);
  lab::profile::PerfCounters perf;  // before the library's threads are there: those that start later are counted with it

  auto so_far = std::make_shared<SoFar>();
  Profile& profile = so_far->profile;
  profile.begin_ns = lab::profile::now_ns();
  profile.flags = repeating_flags(flags);
  profile.spec = spec;
  profile.grad = problem.grad();
  profile.cuda = place.device == Device::kCuda;
  profile.device = place.name();
  profile.device_name = machine.name;
  profile.sort = kSorts.at(flags.sort);
  profile.top = static_cast<size_t>(flags.top);
  profile.environment = measure::environment();
  if (profile.cuda) profile.gpu = gpu_json(place.index);
  if (!machine.lacks.empty()) profile.notes.push_back(machine.lacks);

  const std::vector<Pass> passes = problem.grad() ? std::vector{Pass::kForward, Pass::kBackward} : std::vector{Pass::kForward};
  RaceOptions options;
  options.grad = problem.grad();
  options.passes = problem.passes();
  options.sampling = problem.sampling();
  options.memory_limit = problem.memory_limit();
  options.patience = problem.patience();
  options.oracle_flops = kOracleFlops;
  options.library = problem.options();
  options.place = place;
  std::vector<std::unique_ptr<Contestant>> owned;
  std::vector<Contestant*> contestants;
  const ProviderFlags providers;
  for (const char* name : {"fattn", "standard"})
    contestants.push_back(owned.emplace_back(make_contestant(name, options.library, place, providers)).get());
  {
    Kept kept(folder.file("profile.json"));
    Progress progress("profile");
    options.progress = &progress;
    const auto status = std::make_shared<StatusFile>(flags.status, "profile", 1 + 2 * lab::profile::steps_of(passes), 0);
    kept.before_end([status] { status->end("interrupted"); });
    const auto keep = [&](const std::string& what) {
      auto snapshot = std::make_shared<SoFar>(*so_far);
      snapshot->profile.interrupted = what;
      kept.keep([snapshot, &folder, &flags] { return folder.write(snapshot->profile, records_of(flags, snapshot->race, false)); }, what);
    };
    options.keep = [&](const RaceResult& race, const std::string& what) {
      so_far->race = race;
      profile.rows = race.rows;
      keep("times of " + what);
    };
    status->now("times: fattn, standard");
    measure_reads(options, spec);
    so_far->race = race(spec, contestants, options);
    if (const std::string warning = warning_of(so_far->race.disturbance, so_far->race.rows); !warning.empty()) profile.notes.push_back(warning);
    profile.rows = so_far->race.rows;
    for (Contestant* contestant : contestants) contestant->release();
    status->step(0);
    keep("times");
    profile.begin_ns = lab::profile::now_ns();
    const Inputs inputs = make_inputs(spec, problem.grad());
    for (const char* name : {"standard", "fattn"}) {
      status->now(std::string("recording and counting: ") + name);
      lab::profile::AttentionRun run;
      run.spec = spec;
      run.options = problem.options();
      if (run.side = name; run.side == "standard") {
        run.options.algorithm = Algorithm::kStandard;
        run.options.cpu_isa = Isa::kAuto;  // that of the matrix library
        if (!profile.cuda) run.options.backend = Backend::kCpu;
      }
      run.place = place;
      run.calls = flags.calls;
      run.memory_limit = problem.memory_limit();
      run.perf = profile.cuda ? nullptr : &perf;
      run.cupti = profile.cuda ? &lab::profile::cupti_here() : nullptr;
      lab::profile::Lane lane;
      lab::profile::Side side = profile_attention(run, inputs, passes, lane, profile.notes, [&] { status->step(0); });
      profile.sides.push_back(std::move(side));
      profile.lanes.push_back(std::move(lane));
      keep(std::string("times, and what was recorded of ") + (profile.sides.size() == 1 ? "standard" : "standard and fattn"));
    }
    if (flags.nsight || (profile.cuda && !flags.no_nsight)) {
      status->now("nsys and ncu");
      progress.say("once more under Nsight Systems and Nsight Compute, where they are installed");
      std::vector<std::string> quick = problem.repeating_flags();
      quick.insert(quick.end(), {"--repeats", "6", "--warmup", "1", "--min-time", "0", "--max-time", "0.1"});
      profile.tools = run_nsight(bench_command(quick), folder.path());
    } else {
      profile.tools = no_nsight(profile.cuda ? "left out by --no-nsight" : "not asked for on a CPU; --nsight runs it");
    }
    status->end("done");
  }
  profile.verdict = verdict_of(profile);
  const nlohmann::ordered_json json = folder.write(profile, records_of(flags, so_far->race, true));
  if (!problem.json().empty()) write_json(json, problem.json());
  Output out(flags.output, problem.json());
  print_profile(out, profile, folder.path());
  return exit_code_of(profile.rows);
}

int run_on_program(const ProfileFlags& flags) {
  if (flags.problem.problem_given())
    throw CLI::ValidationError(kPrograms, "a program has problems of its own; leave the flags of a problem out, or leave the program out");
  require_writable(flags.problem.json());
  const ProfileFolder folder(flags.out);
  Profile profile = profile_program(flags.program);
  profile.flags = repeating_flags(flags);
  profile.sort = kSorts.at(flags.sort);
  profile.top = static_cast<size_t>(flags.top);
  profile.tools = flags.nsight ? run_nsight(flags.program, folder.path()) : no_nsight("not asked for; --nsight runs the program again under it");
  profile.verdict = verdict_of(profile);
  const nlohmann::ordered_json json = folder.write(profile, {});
  if (!flags.problem.json().empty()) write_json(json, flags.problem.json());
  Output out(flags.output, "-");  // stdout is the program's
  print_profile(out, profile, folder.path());
  return exit_code_of(*profile.program);
}

// What the Python package recorded.
int show_recording(const ProfileFlags& flags) {
  const ProfileFolder folder(flags.out);
  Profile profile;
  profile.device = "program";
  profile.program = lab::profile::ProgramRun{{"a recording"}};
  profile.flags = {"--from", printable(flags.from), "--out", printable(flags.out)};
  profile.sort = kSorts.at(flags.sort);
  profile.top = static_cast<size_t>(flags.top);
  take_traces(profile, flags.from, true);
  if (!profile.lanes.empty()) profile.program->command = {profile.lanes.front().name};
  profile.environment = measure::environment();
  finish_recording(profile);
  profile.verdict = verdict_of(profile);
  const nlohmann::ordered_json json = folder.write(profile, {});
  if (!flags.problem.json().empty()) write_json(json, flags.problem.json());
  Output out(flags.output, flags.problem.json());
  print_profile(out, profile, folder.path());
  return kExitFine;
}

}  // namespace

void add_profile(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("profile", "Where time and memory go: operations, counters, timeline, memory, a verdict, in one folder");
  auto flags = std::make_shared<ProfileFlags>();
  flags->problem.add_to(*command);
  command->option_defaults()->group("Profile");
  command->add_option("--out", flags->out, "The folder, made where it is not there; one that an earlier profile left is written anew")
      ->type_name("DIR")
      ->capture_default_str();
  command->add_option("--calls", flags->calls, "Calls of each pass that are recorded")->check(whole_number(1, 1000))->capture_default_str();
  command->add_option("--top", flags->top, "Operations that tables show; operations.csv has all")
      ->check(whole_number(1, 100000))
      ->capture_default_str();
  std::vector<std::string> sorts;
  sorts.reserve(kSorts.size());
  for (const auto& [name, by] : kSorts) sorts.push_back(name);
  command->add_option("--sort", flags->sort, "Order of operations")->transform(one_of(sorts))->type_name("NAME")->capture_default_str();
  command->add_flag(
      "--nsight,!--no-nsight", [flags](int64_t given) { (given > 0 ? flags->nsight : flags->no_nsight) = true; },
      "Run it once more under Nsight Systems and Nsight Compute, where they are installed; not given: of a problem on a GPU");
  command->add_option("--status", flags->status, "A file that says what is being done while it runs (docs/RECORD.md)")->type_name("FILE");
  command->add_option("--from", flags->from, "Instead of measuring: the folder of traces that fattn.lab.profile of the Python package recorded")
      ->type_name("DIR");
  command->option_defaults()->group("Options");
  flags->output.add_to(*command);
  command->add_option(kPrograms, flags->program, "Behind --: a program that uses libfattn.so, and its arguments, instead of a problem")->expected(-1);
  command->footer(
      "Of a problem: standard attention and fattn are checked and timed first, as `fattn compare` does; then calls are recorded, then counted, so "
      "that no "
      "profiler is beside what is timed. Of a program: what the library and the GPU do inside of it is recorded, its processors' counters and its "
      "memory are "
      "looked at from outside, and its exit code is that of this command.\n"
      "What cannot be had (a counter that the kernel or the driver refuses, a tool that is not here) has its reason in the folder and is no error. "
      "Ctrl-C "
      "keeps what was measured.\ndocs/PROFILING.md explains each number.\n\n"
      "Examples:\n"
      "  fattn profile --preset gpt2-small --out profile\n"
      "  fattn profile --seqlen 4096 --causal --dtype bf16 --device cuda --out profile\n"
      "  fattn profile --out profile -- python3 train.py --steps 10");
  command->callback([flags, &exit_code] {
    if (!flags->from.empty() && !flags->program.empty()) throw CLI::ValidationError("--from", "shows what was recorded; leave the program out");
    exit_code = !flags->from.empty() ? show_recording(*flags) : flags->program.empty() ? run_on_attention(*flags) : run_on_program(*flags);
  });
}

}  // namespace fattn::cli
