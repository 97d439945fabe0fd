#include "cli/watch_reading.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <ctime>
#include <exception>
#include <filesystem>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "cli/sanitize.h"
#include "measure/environment.h"

namespace fattn::cli {
namespace {

int64_t now_ns() { return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// 0: it is no number.
int64_t number_in(const std::string& text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() && number > 0 ? number : 0;
}

}  // namespace

Watcher::Watcher(const std::string& target) {
  if (target.empty()) return;
  std::error_code error;
  const std::filesystem::file_status there = std::filesystem::status(target, error);
  if (std::filesystem::is_directory(there)) {
    status_path_ = status_file_in(target);
  } else if (std::filesystem::exists(there)) {
    status_path_ = target;
  } else if (const int64_t pid = number_in(target); pid > 0) {
    const std::optional<measure::ProcessState> process = measure::process_state(pid);
    if (!process) throw std::runtime_error(fmt::format("there is no process {}; give the number of a running one, a folder or a status file", pid));
    pid_ = pid;
    status_path_ = status_file_of(pid);
  } else {
    throw std::runtime_error("there is no '" + printable(target, 300) + "'; give the number of a running process, a folder or a status file");
  }
  if (!status_path_.empty()) last_status_ = read_status(status_path_);
}

void Watcher::read_status_file(WatchReading& reading) {
  if (status_path_.empty()) return;
  try {
    last_status_ = read_status(status_path_);
  } catch (const std::exception& error) {
    reading.status_problem = error.what();
  }
  reading.status = last_status_;
  reading.silent_seconds = static_cast<double>(std::time(nullptr) - last_status_->updated);
  if (pid_ == 0 || !last_status_->running()) pid_ = last_status_->pid;
}

std::string Watcher::end_of(const WatchReading& reading) const {
  if (reading.status && !reading.status->running()) return reading.status->state;
  if (reading.pid == 0 || reading.process) return {};
  if (!reading.status) return "ended";
  // A process on another machine is not seen here, but writes on.
  return reading.silent_seconds >= kLongSilence ? "vanished" : "";
}

WatchReading Watcher::read() {
  WatchReading reading;
  reading.time = measure::now_utc();
  read_status_file(reading);
  reading.pid = pid_;
  if (pid_ > 0) reading.process = measure::process_state(pid_);
  if (reading.process) {
    if (started_ == 0) started_ = reading.process->started;
    // A later one with its number.
    const bool later = reading.status && reading.process->started > static_cast<double>(reading.status->updated) + kLongSilence;
    if (later || reading.process->started != started_) reading.process.reset();
  }
  reading.gpus = gpus_.read();
  reading.gpu_problem = gpus_.problem();
  for (const measure::GpuState& gpu : reading.gpus)
    if (gpu.processes)
      for (const measure::GpuProcess& one : *gpu.processes) {
        const std::optional<measure::ProcessState> process = measure::process_state(one.pid);
        reading.process_names.push_back(process ? process->name : std::string());
      }
  reading.machine = measure::machine_state();
  const int64_t ns = now_ns();
  const double passed = static_cast<double>(ns - last_ns_) * 1e-9;
  if (last_machine_ && passed > 0) {
    if (const double all = reading.machine.all_seconds - last_machine_->all_seconds; all > 0)
      reading.busy = std::clamp((reading.machine.busy_seconds - last_machine_->busy_seconds) / all, 0.0, 1.0);
    if (reading.process && last_cpu_seconds_) reading.process_cpus = std::max(0.0, reading.process->cpu_seconds - *last_cpu_seconds_) / passed;
  }
  last_machine_ = reading.machine;
  last_cpu_seconds_ = reading.process ? std::optional<double>(reading.process->cpu_seconds) : std::nullopt;
  last_ns_ = ns;
  reading.end = end_of(reading);
  return reading;
}

}  // namespace fattn::cli
