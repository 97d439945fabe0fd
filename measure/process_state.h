// What Linux says of a process and of the machine at a moment, in /proc, for who watches.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fattn::measure {

struct ProcessState {
  std::string name;        // the program's, of up to 15 bytes, as it calls itself
  double cpu_seconds = 0;  // that all of its threads have computed
  int64_t threads = 0;
  uint64_t resident_bytes = 0;
  double started = 0;  // in seconds since 1970: tells it from a later process with its number
};
// Nothing: there is no such process, or it has ended and waits for its parent.
std::optional<ProcessState> process_state(int64_t pid);

// What it was started with; empty where that is not to be read.
std::vector<std::string> command_line_of(int64_t pid);
std::string working_folder_of(int64_t pid);

struct MachineState {
  double busy_seconds = 0, all_seconds = 0;  // of all its CPUs since it was started
  int cpus = 0;
  double load = 0;  // threads that want a CPU, mean of a minute
  uint64_t memory_bytes = 0, memory_available_bytes = 0;
};
MachineState machine_state();

}  // namespace fattn::measure
