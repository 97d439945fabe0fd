// Measures only where nothing that serves is there yet, and says what it found in words.
#include "cli/calibrate.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/compile_beside.h"
#include "cli/json_output.h"
#include "cli/output.h"
#include "cli/progress.h"
#include "cli/sanitize.h"
#include "cli/target_flags.h"
#include "cli/usage_error.h"
#include "cli/values.h"
#include "lab/calibrate.h"

namespace fattn::cli {
namespace {

using lab::Calibration;

constexpr double kNoisy = 0.1;  // spread of a quantity beyond which its median is worth a remark

struct CalibrateFlags {
  std::string device = "cpu", json;
  double kernel_seconds = 30;
  bool show = false, force = false;
  int repeats = lab::CalibrateOptions().samples;
  OutputFlags output;
};

// Three digits and a prefix.
std::string scaled(double value, const char* unit) {
  const char* const prefixes[] = {"", "k", "M", "G", "T", "P"};
  size_t at = 0;
  while (value >= 999.5 && at + 1 < std::size(prefixes)) value /= 1000, ++at;
  return fmt::format("{:.3g} {}{}", value, prefixes[at], unit);
}

void print_table(Output& out, const Calibration& c) {
  Table table({Column::text("what").as_key(), Column::number("median"), Column::number("lowest").ranked(2), Column::number("highest").ranked(1),
               Column::number("spread")},
              c.on_cuda() ? "What the GPU did at most" : "What the processor did at most");
  for (const lab::Quantity& q : lab::quantities(c.on_cuda())) {
    const lab::Measured& m = c.measured.at(q.name);
    if (!m.known()) {
      table.add({q.words, Cell("-", "")});
      table.note("not measured: " + printable(m.reason, 300));
      continue;
    }
    const auto cell = [&](double value) { return Cell(rate_text(q.name, value), fmt::format("{}", value)); };
    table.add({q.words, cell(m.value), cell(m.low), cell(m.high), percent_cell(m.spread()).in(m.spread() > kNoisy ? Mood::kUnsure : Mood::kPlain)});
  }
  out.print(table);
}

// "N times", where both are known.
std::optional<double> ratio(const Calibration& c, const char* a, const char* b) {
  const double x = c.of(a), y = c.of(b);
  return x > 0 && y > 0 ? std::optional(x / y) : std::nullopt;
}

void say_findings(Output& out, const Calibration& c) {
  std::string words;
  const char* const best = c.on_cuda()                                          ? "matrix_flops_per_s"
                           : c.of("bf16_flops_per_s") > c.of("fma_flops_per_s") ? "bf16_flops_per_s"
                                                                                : "fma_flops_per_s";
  const char* const near = c.on_cuda() ? "shared_read_bytes_per_s" : "l1_read_bytes_per_s";
  if (const auto times = ratio(c, near, "dram_read_bytes_per_s"))
    words += fmt::format("{} is read at {}, DRAM at {}: {:.0f} times as fast. ", c.on_cuda() ? "Shared memory" : "The L1 cache",
                         rate_text(near, c.of(near)), rate_text("dram_read_bytes_per_s", c.of("dram_read_bytes_per_s")), *times);
  if (const auto flops = ratio(c, best, "dram_read_bytes_per_s"))
    words += fmt::format("A kernel that does fewer than {:.0f} FLOP for every byte of DRAM waits for memory. ", *flops);
  if (const auto flops = ratio(c, best, "exp_per_s")) words += fmt::format("One exponential takes the time of {:.0f} FLOP at the peak.", *flops);
  if (!words.empty()) out.say("\n" + words);
  int noisy = 0;
  for (const lab::Quantity& q : lab::quantities(c.on_cuda())) noisy += c.measured.at(q.name).spread() > kNoisy ? 1 : 0;
  if (noisy > 0)
    out.say(
        fmt::format("{} of {} quantities spread over more than {:.0f} %: something else was at work. Medians are kept; for better ones run "
                    "`fattn calibrate --force` on a quiet machine.",
                    noisy, lab::quantities(c.on_cuda()).size(), 100 * kNoisy));
}

void say_kernels(Output& out, const lab::KernelTimes& kernels) {
  int samples = 0;
  double errors = 0;
  for (const auto& [name, family] : kernels.families) samples += family.samples, errors += family.samples * family.mean_error;
  if (samples > 0)
    out.say(
        fmt::format("Constants of {} families of kernels come from {} calls in {:.0f} s; `fattn predict` uses them. Each call predicted from the "
                    "others is {:.1f} % off in the mean.",
                    kernels.families.size(), samples, kernels.seconds, 100 * errors / samples));
  if (kernels.too_few.empty()) return;
  const double longer = std::max(60.0, 4 * std::ceil(kernels.seconds));
  out.say(
      fmt::format("{} of {} families of kernels were called too few times in {:.0f} s to have constants, so that `fattn predict` does "
                  "not know their times. On a quiet machine, or with --kernel-seconds {:.0f}, `fattn calibrate --force` makes more calls.",
                  kernels.too_few.size(), kernels.families.size() + kernels.too_few.size(), kernels.seconds, longer));
}

std::string machine_words(const Calibration& c) {
  std::string words;
  for (const auto& [name, value] : c.machine)
    if (name == (c.on_cuda() ? "GPU" : "processor")) words = printable(value, 200);
  if (c.on_cuda())
    return fmt::format("{}, {:.0f} SMs with {:.0f} KiB of shared memory, L2 {:.0f} MiB", words, c.fact("multiprocessors"),
                       c.fact("shared_per_multiprocessor_bytes") / 1024, c.fact("l2_bytes") / (1 << 20));
  return fmt::format("{}, {:.0f} thread{}", words, c.fact("threads"), c.fact("threads") == 1 ? "" : "s");
}

// What is kept and serves; nothing where there is none, and `why`.
std::optional<Calibration> kept(const std::string& device, std::string& why) {
  try {
    return lab::stored_calibration(device);
  } catch (const lab::CalibrationError& error) {
    why = error.what();
    return std::nullopt;
  }
}

int run(const CalibrateFlags& flags) {
  if (flags.show && flags.force) throw CLI::ValidationError("--show", "shows what is kept and --force measures anew; give one of them");
  require_writable(flags.json);
  const std::string path = lab::calibration_path(flags.device);
  Output out(flags.output, flags.json);
  std::string why;
  std::optional<Calibration> calibration;
  if (!flags.force) calibration = kept(flags.device, why);
  if (calibration && !calibration->kernels && flags.kernel_seconds > 0 && !flags.show) calibration.reset();  // made without them
  if (!calibration && flags.show) {
    print_error(printable(why));
    return kExitBadInput;
  }
  const bool measured = !calibration;
  if (measured) {
    require_writable(path);
    lab::CalibrateOptions options;
    options.device = flags.device;
    options.samples = flags.repeats;
    const int total = static_cast<int>(lab::quantities(flags.device != "cpu").size()) * options.samples;
    Progress progress("calibrating", total);
    options.progress = [&progress](int done, int, const std::string&) {
      if (done > 0) progress.step();
    };
    options.kernel_seconds = flags.kernel_seconds;
    std::optional<Progress> kernels;
    int shown = 0;
    options.kernel_progress = [&](double share, const std::string& what) {
      if (!kernels) kernels.emplace(what, 100);
      for (; shown < static_cast<int>(100 * share); ++shown) kernels->step();
    };
    options.compile = [](const std::vector<measure::ProblemSpec>& specs, const std::function<void(double)>& compiled) {
      compile_beside(specs, {}, compiled);
    };
    calibration = lab::calibrate(options);
    kernels.reset();
    progress.wipe();
    write_json(lab::to_json(*calibration), path);
  }
  out.say(fmt::format(
      "{}: {}, {}.", measured ? "Measured" : "Measured before", machine_words(*calibration),
      measured ? fmt::format("in {:.0f} s", calibration->seconds) : calibration->environment.value("date", std::string("at an unknown time"))));
  out.say("Kept in " + printable(path) + (measured ? "" : "; --force measures anew"), 2);
  print_table(out, *calibration);
  say_findings(out, *calibration);
  if (calibration->kernels) say_kernels(out, *calibration->kernels);
  if (!flags.json.empty()) write_json(lab::to_json(*calibration), flags.json);
  return kExitFine;
}

}  // namespace

std::string rate_text(const std::string& name, double value) {
  const auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
  if (has("flops_per_s")) return scaled(value, "FLOP/s");
  if (has("bytes_per_s")) return scaled(value, "B/s");
  if (has("per_s")) return scaled(value, "/s");
  return seconds_text(value);
}

void add_calibrate(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("calibrate", "Measure once what this machine can do at most: arithmetic, caches, memory, calls");
  auto flags = std::make_shared<CalibrateFlags>();
  add_device(*command, flags->device)->description("What to measure: cpu, cuda or cuda:INDEX; `fattn info` lists the devices");
  command->add_flag("--show", flags->show, "Show what is kept; measure nothing");
  command->add_flag("--force", flags->force, "Measure anew, whatever is kept");
  command->add_option("--repeats", flags->repeats, "Samples of each quantity")->check(whole_number(1, 1000))->type_name("N")->capture_default_str();
  command
      ->add_option("--kernel-seconds", flags->kernel_seconds,
                   "For so long the library's kernels are timed, of which `fattn predict` makes its constants; 0: not at all")
      ->check(number(0, 3600))
      ->type_name("X")
      ->capture_default_str();
  command->add_option("--json", flags->json, "Write it as JSON to a file, or - for stdout")->type_name("FILE|-")->group("Output");
  flags->output.add_to(*command);
  command->footer(
      "Takes less than a minute, once a machine: the record is kept in the folder of the kernel cache (FATTN_CACHE_DIR, else ~/.cache/fattn) and "
      "serves the same processor, number of threads, instruction set, GPU, driver and version of fattn only. Every number is the median of its "
      "samples, which are spread over the whole time. Arithmetic, caches and memory are held against the time that each thread had on a processor, "
      "so that other programs do little harm; "
      "calls are held against the clock on the wall. Copies count what is read and what is written.");
  command->callback([flags, &exit_code] { exit_code = run(*flags); });
}

}  // namespace fattn::cli
