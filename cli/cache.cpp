// One function a subcommand, each over fattn/cache.hpp.
#include "cli/cache.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/json_output.h"
#include "cli/output.h"
#include "cli/problem_flags.h"
#include "cli/sanitize.h"
#include "cli/streams.h"
#include "cli/table.h"
#include "cli/usage_error.h"
#include "cli/values.h"
#include "fattn/cache.hpp"
#include "fattn/problem.hpp"
#include "lab/prediction_score.h"
#include "measure/library_plans.h"

namespace fattn::cli {
namespace {

using Json = nlohmann::ordered_json;

std::string target_of(const fattn_cache_entry& entry) { return fmt::format("sm_{}{}", entry.arch, entry.arch_specific ? "a" : ""); }

const char* origin_of(const fattn_cache_entry& entry) {
  return entry.origin == FATTN_FROM_DISK ? "disk cache" : entry.origin == FATTN_FROM_PACK ? "pack" : "compiled";
}

// UTC, as records have it.
std::string time_text(int64_t seconds) {
  const auto t = static_cast<std::time_t>(seconds);
  std::tm parts{};
  char text[32] = "";
  if (gmtime_r(&t, &parts)) std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

Json as_json(const fattn_cache_entry& entry) {
  if (entry.damage[0])
    return {{"key", printable(entry.key)}, {"bytes", entry.bytes}, {"last_used", time_text(entry.last_used)}, {"damage", printable(entry.damage)}};
  Json json = {{"name", printable(entry.name)},
               {"description", printable(entry.description)},
               {"target", target_of(entry)},
               {"key", printable(entry.key)},
               {"nvrtc", fmt::format("{}.{}", entry.nvrtc_major, entry.nvrtc_minor)},
               {"registers", entry.registers},
               {"stack_bytes", entry.stack_bytes},
               {"spill_bytes", entry.spill_bytes},
               {"shared_bytes", entry.shared_bytes},
               {"bytes", entry.bytes},
               {"compile_seconds", entry.compile_seconds},
               {"damage", nullptr}};
  if (entry.last_used > 0)
    json["last_used"] = time_text(entry.last_used);
  else
    json["origin"] = origin_of(entry);
  return json;
}

Json record_of(const char* command) { return {{"fattn_cache", 1}, {"command", command}}; }

struct CacheFlags {
  std::string json, pack, use_pack;
  std::vector<int32_t> archs;
  bool problems_come = false;  // on standard input
  ProblemFlags problem;
  OutputFlags output;
};

CLI::Option* add_json(CLI::App& command, CacheFlags& flags) {
  CLI::Option* json = command.add_option("--json", flags.json, "Write what was found or done as JSON to a file, or - for stdout");
  json->type_name("FILE|-")->group("Output");
  return json;
}

int path(const CacheFlags& flags) {
  const fattn_cache_info info = cache::info();
  put(text_stream(flags.json), printable(info.path) + "\n");
  if (!info.usable) print_error(fmt::format("not usable: {}; kernels are compiled anew by every process", printable(info.reason)));
  if (!flags.json.empty()) {
    Json record = record_of("path");
    record["path"] = printable(info.path);
    record["usable"] = info.usable != 0;
    record["reason"] = info.usable ? Json(nullptr) : Json(printable(info.reason));
    record["entries"] = info.entries;
    record["bytes"] = info.bytes;
    record["limit_bytes"] = info.limit_bytes;
    record["installed_pack"] = printable(info.pack);
    write_json(record, flags.json);
  }
  return info.usable ? kExitFine : kExitCheckFailed;
}

int list(const CacheFlags& flags) {
  const fattn_cache_info info = cache::info();
  const std::vector<fattn_cache_entry> entries = cache::list();
  Output out(flags.output, flags.json);
  Table table({Column::text("kernel").as_key(), Column::text("for").wrapping(30), Column::text("target"), Column::number("registers").ranked(3),
               Column::number("spilled", "bytes").ranked(2), Column::number("KiB").ranked(1), Column::number("compiled in", "s").ranked(4),
               Column::text("last used").ranked(5), Column::text("NVRTC").ranked(6)});
  Json all = Json::array();
  for (const fattn_cache_entry& e : entries) {
    all.push_back(as_json(e));
    const std::string kib = fmt::format("{}", (e.bytes + 1023) / 1024);
    if (e.damage[0]) {
      table.add({printable(e.key, 16), "", "", "", "", kib, "", time_text(e.last_used), ""});
      table.note("damaged: " + printable(e.damage));
      continue;
    }
    table.add({printable(e.name), printable(e.description), target_of(e), std::to_string(e.registers), std::to_string(e.spill_bytes), kib,
               seconds_cell(e.compile_seconds), time_text(e.last_used), fmt::format("{}.{}", e.nvrtc_major, e.nvrtc_minor)});
  }
  if (!entries.empty() || out.for_programs()) out.print(table);
  out.say(fmt::format("{} kernels, {} of at most {} in {}", entries.size(), bytes_text(static_cast<double>(info.bytes)),
                      bytes_text(static_cast<double>(info.limit_bytes)), printable(info.path)),
          2);
  if (!info.usable) out.say("not usable: " + printable(info.reason), 2);
  if (!flags.json.empty()) {
    Json record = record_of("list");
    record["path"] = printable(info.path);
    record["entries"] = all;
    write_json(record, flags.json);
  }
  return kExitFine;
}

int clear(const CacheFlags& flags) {
  const cache::Cleared gone = cache::clear();
  put(text_stream(flags.json), fmt::format("removed {} kernels, {}\n", gone.entries, bytes_text(static_cast<double>(gone.bytes))));
  if (!flags.json.empty()) {
    Json record = record_of("clear");
    record["entries"] = gone.entries;
    record["bytes"] = gone.bytes;
    write_json(record, flags.json);
  }
  return kExitFine;
}

std::vector<std::optional<fattn_problem>> passes_of(const measure::ProblemSpec& spec, const CacheFlags& flags) {
  const measure::Placement place{Device::kCuda, 0, false};
  Options options = flags.problem.options();
  options.backend = Backend::kCuda;
  spec.apply_to(options);
  std::vector<std::optional<fattn_problem>> all = {describe(measure::forward_tensors(spec, place), options)};
  if (flags.problem.grad()) all.emplace_back(describe(measure::backward_tensors(spec, place), options));
  return all;
}

// The passes of the problem that the flags describe, or one empty one: the built-in list.
std::vector<std::optional<fattn_problem>> problems_of(const CacheFlags& flags) {
  if (!flags.problem.problem_given()) return {std::nullopt};
  ProblemFlags problem = flags.problem;
  problem.target.device = "cuda";  // whose kernels these are
  return passes_of(problem.spec(), flags);
}

// What prints a line for every kernel that is ready and keeps it for the record.
cache::Visit progress(const Output& out, Json& kernels) {
  return [&out, &kernels](const fattn_cache_entry& e, int32_t index, int32_t count) {
    kernels.push_back(as_json(e));
    out.say_line(
        fmt::format("{:>4}/{} {} {}{}{}, {} registers{}, {}{}", index + 1, count, printable(e.name), target_of(e), e.description[0] ? ", " : "",
                    printable(e.description), e.registers, e.spill_bytes > 0 ? fmt::format(", {} bytes spilled", e.spill_bytes) : "", origin_of(e),
                    e.origin == FATTN_FROM_COMPILER ? " in " + seconds_text(e.compile_seconds) : ""),
        5);
  };
}

// Problems as records have them, one JSON object a line; each is answered by a line: how many kernels are ready, or why not. Compilers of several
// processes are fed so.
int warm_what_comes(const CacheFlags& flags, const std::vector<int32_t>& archs) {
  bool all_ready = true;
  for (std::string line; std::getline(std::cin, line);) {
    int ready = 0;
    std::string answer;
    try {
      const measure::ProblemSpec spec = lab::spec_from_json(Json::parse(line));
      for (const int32_t arch : archs)
        for (const auto& problem : passes_of(spec, flags)) cache::warm(&*problem, arch, [&](const fattn_cache_entry&, int32_t, int32_t) { ++ready; });
      answer = fmt::format("{} kernels\n", ready);
    } catch (const std::exception& error) {
      answer = fmt::format("not compiled: {}\n", printable(error.what(), 400));
      all_ready = false;
    }
    put(stdout, answer);
  }
  return all_ready ? kExitFine : kExitCheckFailed;
}

int warm(const CacheFlags& flags) {
  if (!flags.use_pack.empty()) cache::use_pack(std::filesystem::absolute(flags.use_pack));
  const std::vector<int32_t> archs = flags.archs.empty() ? std::vector<int32_t>{0} : flags.archs;
  if (flags.problems_come) return warm_what_comes(flags, archs);
  const Output out(flags.output, flags.json);
  Json kernels = Json::array();
  for (const int32_t arch : archs)
    for (const auto& problem : problems_of(flags)) cache::warm(problem ? &*problem : nullptr, arch, progress(out, kernels));
  const fattn_cache_info info = cache::info();
  if (!info.usable) print_error("nothing was kept: " + printable(info.reason));
  if (!flags.json.empty()) {
    Json record = record_of("warm");
    record["path"] = printable(info.path);
    record["kernels"] = kernels;
    write_json(record, flags.json);
  }
  return info.usable ? kExitFine : kExitCheckFailed;
}

int pack(const CacheFlags& flags) {
  const Output out(flags.output, flags.json);
  Json kernels = Json::array();
  const auto problems = problems_of(flags);
  std::vector<fattn_problem> given;
  for (const auto& problem : problems)
    if (problem) given.push_back(*problem);
  cache::pack(flags.pack, given, flags.archs, progress(out, kernels));
  out.say(fmt::format("wrote {}: {} kernels", printable(flags.pack), kernels.size()), 2);
  if (!flags.json.empty()) {
    Json record = record_of("pack");
    record["output"] = printable(flags.pack);
    record["kernels"] = kernels;
    write_json(record, flags.json);
  }
  return kExitFine;
}

constexpr const char* kProblemFooter =
    "With flags of a problem, the kernels of that problem, forward and backward; without, those of a list of common shapes and options.";

void add_problem(CLI::App& command, CacheFlags& flags) {
  flags.problem.add_problem_to(command);
  command.add_flag("--deterministic", flags.problem.target.deterministic, "A backward pass that gives the same bits every run");
  command.add_flag("--batch-invariant", flags.problem.target.batch_invariant, "A forward pass where the bits of a row are its own");
  command.add_option("--cuda-level", flags.problem.target.cuda_level, "Kernels for this compute capability; 0: the best for the architecture")
      ->transform(one_of({"0", "75", "80"}))
      ->type_name("N")
      ->capture_default_str();
}

void add_archs(CLI::App& command, CacheFlags& flags, const char* help) {
  command.add_option("--arch", flags.archs, help)
      ->delimiter(',')
      ->check(whole_number(50, 999))
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->type_name("N,...");
}

}  // namespace

void add_cache(CLI::App& app, int& exit_code) {
  CLI::App* cache_app = app.add_subcommand("cache", "Look at and fill the folder that keeps compiled GPU kernels");
  cache_app->require_subcommand(1);
  cache_app->footer(
      "A kernel is compiled when it is first needed and kept in the folder that `fattn cache path` prints (FATTN_CACHE_DIR); what was used longest "
      "ago is removed when there is too much. Every one of these commands takes --json FILE|-.");
  const auto add = [&](const char* name, const char* help, int (*run)(const CacheFlags&)) {
    CLI::App* command = cache_app->add_subcommand(name, help);
    auto flags = std::make_shared<CacheFlags>();
    command->callback([flags, run, &exit_code] {
      require_writable(flags->json);
      exit_code = run(*flags);
    });
    return std::pair(command, flags);
  };
  const auto [list_command, list_flags] = add("list", "Show the kernels that are there", list);
  add_json(*list_command, *list_flags);
  list_flags->output.add_to(*list_command);
  for (const auto& [command, flags] :
       {add("path", "Print the folder; exit 1 and say why if it cannot be used", path), add("clear", "Remove everything that is there", clear)})
    add_json(*command, *flags);

  const auto [warm_command, warm_flags] = add("warm", "Have kernels ready before they are needed", warm);
  add_archs(*warm_command, *warm_flags, "Compute capabilities to compile for, e.g. 80,90; no GPU need be there [the GPU's]");
  add_problem(*warm_command, *warm_flags);
  warm_command->add_option("--pack", warm_flags->use_pack, "Take kernels from this pack file where it has them")->type_name("FILE");
  CLI::Option* const json = add_json(*warm_command, *warm_flags);
  warm_command
      ->add_flag("--stdin", warm_flags->problems_come,
                 "Problems come on standard input, each a line of JSON as a record's rows have it, and are answered")
      ->excludes(json);
  warm_command->footer(kProblemFooter);

  const auto [pack_command, pack_flags] = add("pack", "Write kernels into one file, for machines without NVRTC", pack);
  pack_command->add_option("--output", pack_flags->pack, "File to write; replaced if it exists")->type_name("FILE")->required();
  add_archs(*pack_command, *pack_flags, "Compute capabilities to compile for, e.g. 80,90; no GPU need be there [all that NVRTC compiles for]");
  add_problem(*pack_command, *pack_flags);
  add_json(*pack_command, *pack_flags);
  pack_command->footer(std::string(kProblemFooter) +
                       "\nAs fattn/kernels.pack beside libfattn.so the file is used without being asked for (`cmake --install` puts one there); "
                       "elsewhere by `fattn cache "
                       "warm --pack`.");
}

}  // namespace fattn::cli
