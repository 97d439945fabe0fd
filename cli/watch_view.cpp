#include "cli/watch_view.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <vector>

#include "cli/sanitize.h"
#include "cli/table.h"
#include "cli/words.h"
#include "measure/gpu_sensors.h"
#include "measure/remaining_time.h"

namespace fattn::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kLabelWidth = 13;
constexpr size_t kMostProcesses = 8;  // of a GPU, for people

std::string gib(uint64_t bytes) { return fmt::format("{:.1f}", static_cast<double>(bytes) / (1 << 30)); }
std::string memory_words(uint64_t used, uint64_t all) { return gib(used) + " of " + gib(all) + " GiB"; }

std::string joined(const std::vector<std::string>& parts) {
  std::string all;
  for (const std::string& part : parts)
    if (!part.empty()) all += (all.empty() ? "" : ", ") + part;
  return all;
}

// In whole seconds while they are few: people wait for them.
std::string left_words(const StatusReading& status) {
  return status.running() && status.seconds_left ? measure::duration_in_words(*status.seconds_left) + " left" : "";
}
std::string step_words(const StatusReading& status) { return fmt::format("{} of {} steps done", std::min(status.step, status.of), status.of); }

std::string silence_words(const WatchReading& reading) {
  if (!reading.status->running() || reading.silent_seconds < kLongSilence) return "";
  return "nothing was heard of it for " + measure::duration_in_words(reading.silent_seconds);
}

// Of one that said how it ended nothing is left to say.
bool shows_process(const WatchReading& reading) { return reading.pid > 0 && (reading.process || reading.end.empty() || reading.end == "vanished"); }

std::string process_words(const WatchReading& reading) {
  if (!reading.process) return "not on this machine, or gone";
  const measure::ProcessState& process = *reading.process;
  return joined({reading.process_cpus ? fmt::format("{:.1f} CPUs busy", *reading.process_cpus) : "",
                 bytes_text(static_cast<double>(process.resident_bytes)),
                 fmt::format("{} thread{}", process.threads, process.threads == 1 ? "" : "s")});
}

std::string machine_words(const WatchReading& reading) {
  const measure::MachineState& machine = reading.machine;
  return joined({fmt::format("{}{} CPU{}", reading.busy ? percent_text(*reading.busy) + " of " : "", machine.cpus, machine.cpus == 1 ? "" : "s"),
                 fmt::format("load {:.2f}", machine.load),
                 machine.memory_bytes > 0
                     ? memory_words(machine.memory_bytes - std::min(machine.memory_available_bytes, machine.memory_bytes), machine.memory_bytes)
                     : ""});
}

std::string held_back_words(const measure::GpuState& gpu) {
  std::vector<std::string> all;
  for (const measure::HeldBack& one : measure::kHeldBack)
    if ((gpu.held_back & one.bit) != 0 && std::find(all.begin(), all.end(), one.words) == all.end()) all.emplace_back(one.words);
  return all.empty() ? "" : "held back by " + joined(all);
}

std::string busy_words(const measure::GpuState& gpu) { return gpu.busy ? percent_text(*gpu.busy) + " busy" : ""; }
std::string gpu_memory_words(const measure::GpuState& gpu) {
  return gpu.memory_used_bytes && gpu.memory_bytes ? memory_words(*gpu.memory_used_bytes, *gpu.memory_bytes) : "";
}
std::string clock_words(const measure::GpuState& gpu) {
  if (!gpu.sm_clock_mhz) return "";
  return gpu.highest_sm_clock_mhz ? fmt::format("{:.0f} of {:.0f} MHz", *gpu.sm_clock_mhz, *gpu.highest_sm_clock_mhz)
                                  : fmt::format("{:.0f} MHz", *gpu.sm_clock_mhz);
}
std::string power_words(const measure::GpuState& gpu) {
  if (!gpu.power_w) return "";
  return gpu.power_limit_w ? fmt::format("{:.0f} of {:.0f} W", *gpu.power_w, *gpu.power_limit_w) : fmt::format("{:.0f} W", *gpu.power_w);
}
std::string temperature_words(const measure::GpuState& gpu) { return gpu.temperature_c ? fmt::format("{:.0f} C", *gpu.temperature_c) : ""; }

// In a sentence: `fattn info` says more.
std::string no_gpu_words(const WatchReading& reading) {
  return "none is read: " + printable(reading.gpu_problem.substr(0, reading.gpu_problem.find(". ")), 300);
}

// A label and what is said of it, in as many lines as that takes.
class Screen {
 public:
  explicit Screen(size_t width) : width_(width) {}
  void say(std::string_view label, const std::string& text) {
    if (text.empty()) return;
    std::string lead(label.substr(0, kLabelWidth - 1));
    for (const std::string& line : wrapped(text, width_ - kLabelWidth)) {
      lead.resize(kLabelWidth, ' ');
      all_ += lead + line + "\n";
      lead.clear();
    }
  }
  void leave_out() { all_ += "\n"; }
  const std::string& all() const { return all_; }

 private:
  const size_t width_;
  std::string all_;
};

std::string bar(const StatusReading& status, size_t width) {
  const double share = static_cast<double>(std::min(status.step, status.of)) / static_cast<double>(status.of);
  const size_t filled = static_cast<size_t>(static_cast<double>(width) * share);
  return fmt::format("[{}{}] {}", std::string(filled, '#'), std::string(width - filled, '.'), percent_text(share));
}

Json maybe(const std::optional<double>& number) { return number ? Json(*number) : Json(nullptr); }
Json maybe(const std::optional<uint64_t>& number) { return number ? Json(*number) : Json(nullptr); }

}  // namespace

std::string watch_screen(const WatchReading& reading, const Output& out, size_t width) {
  Screen screen(width);
  if (reading.status) {
    const StatusReading& status = *reading.status;
    const Mood mood = status.state == "done" ? Mood::kGood : status.running() ? Mood::kPlain : Mood::kBad;
    screen.say("fattn", printable(status.command, 60));
    screen.say("state", out.in(mood, status.state) + ", " + joined({step_words(status), left_words(status)}));
    screen.say("", bar(status, std::min<size_t>(30, width - kLabelWidth - 8)));
    screen.say("now", printable(status.now, 200));
    screen.say("", silence_words(reading));
    screen.say("not read", reading.status_problem);
  }
  if (shows_process(reading)) {
    screen.say("process", fmt::format("{}{}", reading.pid, reading.process ? " " + printable(reading.process->name, 60) : ""));
    screen.say("", process_words(reading));
  }
  if (reading.status || shows_process(reading)) screen.leave_out();
  screen.say("CPU", machine_words(reading));
  if (reading.gpus.empty()) screen.say("GPU", no_gpu_words(reading));
  size_t nth = 0;
  for (const measure::GpuState& gpu : reading.gpus) {
    screen.say(fmt::format("GPU {}", gpu.index), printable(gpu.name, 60));
    screen.say("", joined({busy_words(gpu), gpu_memory_words(gpu), clock_words(gpu), power_words(gpu), temperature_words(gpu)}));
    if (const std::string held_back = held_back_words(gpu); !held_back.empty()) screen.say("", out.in(Mood::kUnsure, held_back));
    if (!gpu.processes) continue;
    for (size_t i = 0; i < gpu.processes->size(); ++i, ++nth) {
      const measure::GpuProcess& one = (*gpu.processes)[i];
      if (i < kMostProcesses)
        screen.say(
            "",
            joined({fmt::format("process {}{}", one.pid, reading.process_names[nth].empty() ? "" : " " + printable(reading.process_names[nth], 40)),
                    one.memory_bytes ? gib(*one.memory_bytes) + " GiB" : ""}));
    }
    if (gpu.processes->size() > kMostProcesses) screen.say("", fmt::format("and {} processes more", gpu.processes->size() - kMostProcesses));
  }
  return screen.all();
}

std::string watch_line(const WatchReading& reading) {
  std::vector<std::string> parts;
  if (reading.status) {
    const StatusReading& status = *reading.status;
    parts.push_back(printable(status.command, 60) + " " + status.state + ": " +
                    joined({step_words(status), left_words(status), status.now.empty() ? "" : "now " + printable(status.now, 200)}));
    if (const std::string silence = silence_words(reading); !silence.empty()) parts.push_back(silence);
    if (!reading.status_problem.empty()) parts.push_back("not read: " + reading.status_problem);
  }
  if (shows_process(reading)) parts.push_back(fmt::format("process {}: {}", reading.pid, process_words(reading)));
  parts.push_back("CPU: " + machine_words(reading));
  if (reading.gpus.empty()) parts.push_back("GPU: " + no_gpu_words(reading));
  for (const measure::GpuState& gpu : reading.gpus)
    parts.push_back(fmt::format(
        "GPU {}: {}", gpu.index,
        joined({busy_words(gpu), gpu_memory_words(gpu), clock_words(gpu), power_words(gpu), temperature_words(gpu), held_back_words(gpu)})));
  std::string line = reading.time;
  for (const std::string& part : parts) line += (&part == &parts.front() ? "  " : "; ") + part;
  return line;
}

std::string watch_end(const WatchReading& reading) {
  if (reading.end == "ended") return fmt::format("process {} has ended", reading.pid);
  const std::string command = printable(reading.status->command, 60);
  if (reading.end == "vanished") return fmt::format("{}: process {} has gone without a last word: it was killed", command, reading.pid);
  return command + (reading.end == "done" ? " is done" : reading.end == "failed" ? " has failed" : " was interrupted");
}

nlohmann::ordered_json watch_json(const WatchReading& reading) {
  Json status = nullptr, process = nullptr, gpus = Json::array();
  if (reading.status)
    status = {{"command", printable(reading.status->command)},
              {"state", reading.status->state},
              {"step", reading.status->step},
              {"of", reading.status->of},
              {"now", reading.status->now.empty() ? Json(nullptr) : Json(printable(reading.status->now))},
              {"seconds_left", maybe(reading.status->seconds_left)},
              {"problem", reading.status_problem.empty() ? Json(nullptr) : Json(reading.status_problem)}};
  if (reading.pid > 0) {
    process = {{"pid", reading.pid}, {"running", reading.process.has_value()}};
    if (reading.process)
      process.update({{"name", printable(reading.process->name)},
                      {"cpus_busy", maybe(reading.process_cpus)},
                      {"resident_bytes", reading.process->resident_bytes},
                      {"threads", reading.process->threads}});
  }
  size_t nth = 0;
  for (const measure::GpuState& gpu : reading.gpus) {
    Json held_back = Json::array(), processes = nullptr;
    for (const measure::HeldBack& one : measure::kHeldBack)
      if ((gpu.held_back & one.bit) != 0) held_back.push_back(one.name);
    if (gpu.processes) {
      processes = Json::array();
      for (const measure::GpuProcess& one : *gpu.processes) {
        const std::string& name = reading.process_names[nth++];
        processes.push_back(
            {{"pid", one.pid}, {"name", name.empty() ? Json(nullptr) : Json(printable(name))}, {"memory_bytes", maybe(one.memory_bytes)}});
      }
    }
    gpus.push_back({{"index", gpu.index},
                    {"name", printable(gpu.name)},
                    {"busy", maybe(gpu.busy)},
                    {"memory_busy", maybe(gpu.memory_busy)},
                    {"memory_used_bytes", maybe(gpu.memory_used_bytes)},
                    {"memory_bytes", maybe(gpu.memory_bytes)},
                    {"sm_clock_mhz", maybe(gpu.sm_clock_mhz)},
                    {"highest_sm_clock_mhz", maybe(gpu.highest_sm_clock_mhz)},
                    {"memory_clock_mhz", maybe(gpu.memory_clock_mhz)},
                    {"power_w", maybe(gpu.power_w)},
                    {"power_limit_w", maybe(gpu.power_limit_w)},
                    {"temperature_c", maybe(gpu.temperature_c)},
                    {"held_back_by", held_back},
                    {"processes", processes}});
  }
  return {{"fattn_watch", 1},
          {"time", reading.time},
          {"status", status},
          {"process", process},
          {"cpu",
           {{"cpus", reading.machine.cpus},
            {"busy", maybe(reading.busy)},
            {"load", reading.machine.load},
            {"memory_bytes", reading.machine.memory_bytes},
            {"memory_available_bytes", reading.machine.memory_available_bytes}}},
          {"gpus", gpus},
          {"gpu_problem", reading.gpus.empty() ? Json(printable(reading.gpu_problem)) : Json(nullptr)},
          {"end", reading.end.empty() ? Json(nullptr) : Json(reading.end)}};
}

}  // namespace fattn::cli
