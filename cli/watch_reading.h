// What `fattn watch` finds at a moment: of a long command, its process, the GPUs and the machine.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/status_reading.h"
#include "measure/gpu_state.h"
#include "measure/process_state.h"

namespace fattn::cli {

// A command writes its status every two seconds.
inline constexpr double kLongSilence = 10;

struct WatchReading {
  std::string time;  // UTC, as records have it
  std::optional<StatusReading> status;
  std::string status_problem;  // why the last reading of the status file counts still
  double silent_seconds = 0;   // since the status was written
  int64_t pid = 0;             // 0: no process is watched
  std::optional<measure::ProcessState> process;
  std::optional<double> process_cpus;  // that it kept busy since the reading before
  std::vector<measure::GpuState> gpus;
  std::vector<std::string> process_names;  // of the processes of `gpus`, one behind the other; empty where no name is known
  std::string gpu_problem;                 // why there are none
  measure::MachineState machine;
  std::optional<double> busy;  // share of its CPUs' time since the reading before
  // What is watched has ended: "done", "interrupted", "failed", "ended" (a process that says no more) or "vanished" (without a last word).
  std::string end;
};

class Watcher {
 public:
  // A process's number, a folder or a file; empty: the machine alone. Throws std::runtime_error if there is no such thing.
  explicit Watcher(const std::string& target);

  WatchReading read();

 private:
  void read_status_file(WatchReading& reading);
  std::string end_of(const WatchReading& reading) const;

  std::string status_path_;
  int64_t pid_ = 0;
  double started_ = 0;  // of the process
  std::optional<StatusReading> last_status_;
  std::optional<double> last_cpu_seconds_;
  std::optional<measure::MachineState> last_machine_;
  int64_t last_ns_ = 0;
  const measure::GpuMonitor gpus_;
};

}  // namespace fattn::cli
