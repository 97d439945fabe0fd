// Whether two records were measured on the same machine, with the same flags, at the same clock.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "lab/regress.h"

namespace fattn::lab {
namespace {

// How many samples, how long, and who takes part: rows of another problem or contestant find no partner anyway.
constexpr std::array kNoMatter = {"--repeats",   "--min-time", "--max-time", "--time-limit",   "--patience", "--provider",
                                  "--providers", "--python",   "--timeout",  "--memory-limit", "--seed",     "--quick"};
// The peak of processors that others use, too, moves; that of a GPU hardly.
constexpr double kSamePeakCpu = 0.10, kSamePeakGpu = 0.05;

std::string shown(const Json& value) { return value.is_null() ? "not known" : value.is_string() ? value.get<std::string>() : value.dump(); }

// "" if both have the same or one does not know it.
void compare(std::vector<std::string>& lines, const std::string& what, const JsonPart& was, const JsonPart& is, const char* key) {
  if (was.has(key) && is.has(key) && was.json()[key] != is.json()[key])
    lines.push_back(fmt::format("{} was {}, is {}", what, shown(was.json()[key]), shown(is.json()[key])));
}

std::vector<std::string> machines(const MeasuredRecord& baseline, const MeasuredRecord& current) {
  const JsonPart was(baseline.environment, "environment"), is(current.environment, "environment");
  std::vector<std::string> lines;
  const JsonPart was_cpu = was.object("cpu"), is_cpu = is.object("cpu");
  for (const auto& [key, what] : {std::pair{"vendor", "processor's vendor"},
                                  {"model", "processor"},
                                  {"logical_cpus", "number of processors"},
                                  {"usable_threads", "number of usable threads"},
                                  {"isa_default", "instruction set"},
                                  {"l2_bytes", "L2 cache"},
                                  {"l3_bytes", "L3 cache"}})
    compare(lines, what, was_cpu, is_cpu, key);
  const std::vector<JsonPart> was_gpus = was.list("gpus"), is_gpus = is.list("gpus");
  if (was_gpus.size() != is_gpus.size()) lines.push_back(fmt::format("number of GPUs was {}, is {}", was_gpus.size(), is_gpus.size()));
  for (size_t i = 0; i < std::min(was_gpus.size(), is_gpus.size()); ++i)
    for (const auto& [key, what] : {std::pair{"name", "GPU"},
                                    {"capability", "GPU's capability"},
                                    {"multiprocessors", "number of multiprocessors"},
                                    {"memory_bytes", "GPU's memory"}})
      compare(lines, what, was_gpus[i], is_gpus[i], key);
  return lines;
}

std::map<std::string, std::string> by_name(const std::vector<std::string>& flags) {
  std::map<std::string, std::string> known;
  std::string name;
  for (const std::string& word : flags) {
    const bool flag = word.size() > 2 && word.rfind("--", 0) == 0;
    if (flag) name = word.substr(0, word.find('='));
    std::string& value = known[name];
    if (!flag)
      value += (value.empty() ? "" : " ") + word;
    else if (word.size() > name.size())
      value = word.substr(name.size() + 1);
  }
  for (const char* one : kNoMatter) known.erase(one);
  return known;
}

std::vector<std::string> flags(const MeasuredRecord& baseline, const MeasuredRecord& current) {
  std::vector<std::string> lines;
  if (baseline.command != current.command) lines.push_back("command was " + baseline.command + ", is " + current.command);
  const std::map<std::string, std::string> was = by_name(baseline.flags), is = by_name(current.flags);
  for (const auto& [name, value] : was) {
    const auto at = is.find(name);
    if (at == is.end())
      lines.push_back(fmt::format("{} {} is there no more", name, value));
    else if (at->second != value)
      lines.push_back(fmt::format("{} was {}, is {}", name, value, at->second));
  }
  for (const auto& [name, value] : is)
    if (was.count(name) == 0) lines.push_back(fmt::format("{} {} is new", name, value));
  return lines;
}

std::vector<std::string> clocks(const MeasuredRecord& baseline, const MeasuredRecord& current) {
  std::vector<std::string> lines;
  const JsonPart was(baseline.environment, "environment"), is(current.environment, "environment");
  const std::vector<JsonPart> was_gpus = was.list("gpus"), is_gpus = is.list("gpus");
  for (size_t i = 0; i < std::min(was_gpus.size(), is_gpus.size()); ++i) {
    compare(lines, "GPU's highest clock in kHz", was_gpus[i], is_gpus[i], "clock_khz_max");
    compare(lines, "GPU's power limit in W", was_gpus[i], is_gpus[i], "power_limit_w");
  }
  compare(lines, "governor", was.object("cpu"), is.object("cpu"), "governor");
  const JsonPart was_peaks(baseline.peaks, "peaks"), is_peaks(current.peaks, "peaks");
  const auto peak = [](const JsonPart& peaks, const char* key) {
    return std::max(peaks.object("before").number(key, 0), peaks.object("after").number(key, 0));
  };
  const bool gpu = was_peaks.object("before").text("device", "cpu") != "cpu";
  for (const auto& [key, what] : {std::pair{"fma_flops_per_s", "fp32"}, {"bf16_flops_per_s", "16-bit"}}) {
    const double a = peak(was_peaks, key), b = peak(is_peaks, key);
    if (a > 0 && b > 0 && !(std::abs(b / a - 1) <= (gpu ? kSamePeakGpu : kSamePeakCpu)))
      lines.push_back(
          fmt::format("measured {} peak was {:.4g} GFLOP/s, is {:.4g}: another clock, or other programs beside it", what, a / 1e9, b / 1e9));
  }
  return lines;
}

}  // namespace

std::vector<std::string> obstacles(const MeasuredRecord& baseline, const MeasuredRecord& current, const RegressOptions& options) {
  std::vector<std::string> lines;
  const auto add = [&](const char* what, const std::vector<std::string>& found, const char* flag) {
    for (const std::string& line : found) lines.push_back(fmt::format("another {}: {} ({} compares them all the same)", what, line, flag));
  };
  if (!options.across_machines) add("machine", machines(baseline, current), "--across-machines");
  if (!options.across_flags) add("measurement", flags(baseline, current), "--across-flags");
  if (!options.across_clocks) add("clock", clocks(baseline, current), "--across-clocks");
  return lines;
}

}  // namespace fattn::lab
