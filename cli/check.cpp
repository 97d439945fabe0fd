// Cases are prepared and run by several threads, and reported in the table's order.
#include "cli/check.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <exception>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cli/check_report.h"
#include "cli/interrupt.h"
#include "cli/json_output.h"
#include "cli/kept.h"
#include "cli/output.h"
#include "cli/progress.h"
#include "cli/sanitize.h"
#include "cli/streams.h"
#include "cli/target_flags.h"
#include "cli/usage_error.h"
#include "cli/values.h"
#include "cli/verdicts.h"
#include "fattn/fattn.hpp"
#include "measure/environment.h"
#include "testing/check.h"
#include "testing/pages.h"
#include "testing/random_case.h"

namespace fattn::cli {
namespace {

using Json = nlohmann::ordered_json;
using testing::Case;
using testing::CaseResult;

struct CheckFlags {
  TargetFlags target;
  std::string dtype = "all", filter, json;
  uint64_t random = 0;
  int64_t page_size = 0;
  bool list = false, verbose = false, accuracy = false, values = false;  // the last two: cli/check_python.h
  std::string python;
  OutputFlags output;
};

// Those that can be, forward, with their keys in pages.
std::vector<Case> in_pages(const std::vector<Case>& cases, int64_t page_size) {
  std::vector<Case> paged;
  for (const Case& c : cases)
    if (std::optional<Case> with_pages = testing::in_pages(c, page_size)) paged.push_back(std::move(*with_pages));
  return paged;
}

// The table, or so many random combinations of each dtype.
std::vector<Case> all_of(const CheckFlags& flags) {
  if (flags.random == 0) return testing::all_cases();
  constexpr int64_t kMostHeaddim = 256;
  std::vector<Case> cases;
  for (uint64_t n = 0; n < flags.random; ++n)
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      cases.push_back(testing::random_case(dtype, n, kMostHeaddim));
      cases.back().name += fmt::format("-random{}", n);
    }
  return cases;
}

std::vector<Case> chosen(const CheckFlags& flags) {
  std::vector<Case> cases = all_of(flags);
  if (flags.page_size > 0) cases = in_pages(cases, flags.page_size);
  const size_t all = cases.size();
  std::erase_if(cases, [&](const Case& c) {
    return (flags.dtype != "all" && flags.dtype != name_of(c.dtype)) || c.name.find(flags.filter) == std::string::npos;
  });
  if (cases.empty())
    throw std::runtime_error(fmt::format("none of the {} cases has dtype {} and '{}' in its name; `fattn check --list` shows them", all, flags.dtype,
                                         printable(flags.filter, 100)));
  return cases;
}

// Runs every case on a few threads (the oracle is serial) and hands the results over in order.
class Runner {
 public:
  Runner(const std::vector<Case>& cases, const testing::Target& target, int threads) : cases_(cases), target_(target), results_(cases.size()) {
    const SignalsBlocked blocked;
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
  }
  ~Runner() {
    {
      const std::lock_guard lock(mutex_);
      next_ = cases_.size();
    }
    for (std::thread& thread : threads_) thread.join();
  }
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;

  CaseResult wait_for(size_t index) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return results_[index].has_value(); });
    return *results_[index];
  }

 private:
  void work() {
    for (;;) {
      size_t index;
      {
        const std::lock_guard lock(mutex_);
        if (next_ >= cases_.size()) return;
        index = next_++;
      }
      CaseResult result = run(cases_[index]);
      const std::lock_guard lock(mutex_);
      results_[index] = std::move(result);
      changed_.notify_all();
    }
  }

  CaseResult run(const Case& c) const {
    CaseResult result;
    try {
      return testing::run_case(c, target_);
    } catch (const std::exception& error) {
      result.failure = error.what();
    }
    return result;
  }

  const std::vector<Case>& cases_;
  const testing::Target target_;
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t next_ = 0;
  std::vector<std::optional<CaseResult>> results_;
  std::vector<std::thread> threads_;
};

// About what a case takes, the oracle above all: in the right proportion.
double seconds_of(const Case& c) {
  constexpr double kEach = 1e-3, kFlopsPerSecond = 3e8;
  return kEach + c.flops() / kFlopsPerSecond;
}

Json case_json(const Case& c, const CaseResult& result) {
  return {{"case", c.name},
          {"outcome", word_for(outcome_of(result))},
          {"reason", !result.skipped.empty()   ? Json(printable(result.skipped))
                     : !result.failure.empty() ? Json(printable(result.failure))
                                               : Json(nullptr)},
          {"verdicts", as_json(result.tensors)}};
}

int list(const std::vector<Case>& cases, const std::string& json) {
  Json names = Json::array();
  std::string lines;
  for (const Case& c : cases) {
    names.push_back(c.name);
    lines += c.name + "\n";
  }
  if (json != "-") put(stdout, lines);
  if (!json.empty()) write_json({{"fattn_check", 1}, {"status", "ok"}, {"cases", names}}, json);
  return kExitFine;
}

int check_cases(const CheckFlags& flags) {
  require_writable(flags.json);
  const std::vector<Case> cases = chosen(flags);
  if (flags.list) return list(cases, flags.json);
  Options options;
  flags.target.apply_to(options);
  testing::Target target{options.backend, options.algorithm, options.cpu_isa, options.num_threads};
  target.device = flags.target.on_cuda() ? Device::kCuda : Device::kCpu;
  target.device_index = flags.target.device_index();
  target.deterministic = options.deterministic;
  target.batch_invariant = options.batch_invariant;
  target.cuda_level = options.cuda_level;

  Output out(flags.output, flags.json);
  CheckReport report(out, flags.verbose, flags.random > 0);
  std::mutex mutex;  // of what the record is made of: Ctrl-C may ask for it at any time
  Json results = Json::array();
  const auto record = [&](bool complete) -> Json {
    const std::lock_guard lock(mutex);
    const bool nothing_ran = report.passed() + report.failed() == 0;
    return {{"fattn_check", 1},
            {"status", report.failed() > 0 ? "check_failed"
                       : nothing_ran       ? "unsupported"
                                           : "ok"},
            {"complete", complete},
            {"reason", nothing_ran ? Json(report.first_reason()) : Json(nullptr)},
            {"device", flags.target.device},
            {"backend", flags.target.backend},
            {"algorithm", flags.target.algorithm},
            {"isa", flags.target.isa},
            {"deterministic", target.deterministic},
            {"batch_invariant", target.batch_invariant},
            {"cuda_level", target.cuda_level},
            {"threads", flags.target.threads},
            {"passed", report.passed()},
            {"failed", report.failed()},
            {"skipped", report.skipped()},
            {"environment", measure::environment()},
            {"cases", results}};
  };
  const std::string where =
      fmt::format("device {}, backend {}, algorithm {}, isa {}{}{}{}", flags.target.device, flags.target.backend, flags.target.algorithm,
                  flags.target.isa, target.deterministic ? ", deterministic" : "", target.batch_invariant ? ", batch invariant" : "",
                  target.cuda_level ? fmt::format(", level {}", target.cuda_level) : "");
  out.say(fmt::format("{} case{} on {}", cases.size(), cases.size() == 1 ? "" : "s", where), 2);
  const auto start = std::chrono::steady_clock::now();
  {
    Kept kept(flags.json);
    Progress progress("check");
    for (const Case& c : cases) progress.expect(seconds_of(c), false);
    Runner runner(cases, target, std::min(cpu_info().usable_threads, 16));
    for (size_t i = 0; i < cases.size(); ++i) {
      const CaseResult result = runner.wait_for(i);
      if (report.prints(result)) progress.wipe();
      {
        const std::lock_guard lock(mutex);
        report.add(cases[i], result);
        if (!flags.json.empty()) results.push_back(case_json(cases[i], result));
      }
      kept.keep([&] { return record(false); }, fmt::format("{} of {} cases", i + 1, cases.size()));
      progress.step(seconds_of(cases[i]));
    }
  }
  report.finish(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  const bool nothing_ran = report.passed() + report.failed() == 0;
  if (!flags.json.empty()) write_json(record(true), flags.json);
  if (nothing_ran) throw std::runtime_error("no case could run, so nothing was checked: " + report.first_reason());
  return report.failed() > 0 ? kExitCheckFailed : kExitFine;
}

}  // namespace

void add_check(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("check", "Run the table of cases and judge every output against the float64 oracle");
  auto flags = std::make_shared<CheckFlags>();
  flags->target.add_to(*command);
  command->add_option("--dtype", flags->dtype, "Only cases of this dtype")
      ->transform(one_dtype_of({"all", name_of(DType::kF32), name_of(DType::kF16), name_of(DType::kBF16)}))
      ->type_name("NAME")
      ->capture_default_str();
  command->add_option("--filter", flags->filter, "Only cases with this text in their name")->type_name("TEXT");
  command
      ->add_option("--random", flags->random,
                   "Instead of the table: so many random combinations of features in each dtype, headdim up to 256; the same every time")
      ->check(whole_number(1, 100000))
      ->type_name("N");
  command
      ->add_option("--page-size", flags->page_size,
                   "All of them forward, with keys and values in pages of N keys, as in a paged cache; lengths are rounded up")
      ->check(whole_number(1, 1 << 20))
      ->type_name("N");
  command->add_flag("--verbose", flags->verbose, "Print every case with the errors of its outputs, not only those that fail");
  command->add_flag("--list", flags->list, "Print the names of the cases and run none");
  command->add_option("--json", flags->json, "Write the verdicts as JSON to a file, or - for stdout")->type_name("FILE|-")->group("Output");
  command->add_flag("--accuracy", flags->accuracy,
                    "Instead of the table: errors beside FlashAttention-2's on the same inputs, measured through PyTorch. `fattn check --accuracy "
                    "--help` has its flags");
  command->add_flag("--values", flags->values,
                    "Instead of the table: what NaN, Inf, huge and tiny numbers, hidden or visible, do to the time of a call. `fattn check --values "
                    "--help` likewise");
  command
      ->add_option("--python", flags->python,
                   "With --accuracy or --values: a Python that has the package fattn and torch [python3, then python, of PATH]")
      ->type_name("PATH");
  flags->output.add_to(*command);
  command->footer(
      "The bound: per tensor, the largest error against float64 is at most 2 times (gradients: 3 times) that of standard attention computed in the "
      "same dtype, plus one unit in the last place. In fp16 and bf16 the root of the mean square error (rms) is held against that of "
      "FlashAttention-2's rounding, too: 1.10 times it, and what chance makes of that. NaN never passes where the oracle has none. A case that the "
      "backend does not support is skipped, with the reason. Exit 1 if a case fails.\n\n"
      "Examples:\n"
      "  fattn check --dtype bf16 --filter causal\n"
      "  fattn check --device cuda --random 200\n"
      "  fattn check --accuracy --quick");
  command->callback([flags, &exit_code] { exit_code = check_cases(*flags); });
}

}  // namespace fattn::cli
