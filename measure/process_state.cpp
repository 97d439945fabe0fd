// proc(5) has the formats.
#include "measure/process_state.h"

#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>

namespace fattn::measure {
namespace {

std::string content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::string folder_of(int64_t pid) { return "/proc/" + std::to_string(pid); }

// Seconds since 1970.
double boot_time() {
  std::istringstream stat(content_of("/proc/stat"));
  for (std::string line; std::getline(stat, line);)
    if (line.starts_with("btime ")) return std::strtod(line.c_str() + 6, nullptr);
  return 0;
}

double seconds_of(uint64_t ticks) { return static_cast<double>(ticks) / static_cast<double>(std::max(1L, sysconf(_SC_CLK_TCK))); }

}  // namespace

std::optional<ProcessState> process_state(int64_t pid) {
  const std::string text = content_of(folder_of(pid) + "/stat");
  // The name is in parentheses and may hold any of these.
  const size_t open = text.find('('), close = text.rfind(')');
  if (open == std::string::npos || close == std::string::npos || close < open) return std::nullopt;
  ProcessState process;
  process.name = text.substr(open + 1, close - open - 1);
  std::istringstream rest(text.substr(close + 1));
  char state = 0;
  std::string skipped;
  uint64_t in_user = 0, in_kernel = 0, started = 0;
  int64_t pages = 0;
  rest >> state;
  for (int i = 4; i < 14; ++i) rest >> skipped;
  rest >> in_user >> in_kernel;
  for (int i = 16; i < 20; ++i) rest >> skipped;
  rest >> process.threads >> skipped >> started >> skipped >> pages;
  if (!rest || state == 'Z' || state == 'X') return std::nullopt;
  process.started = boot_time() + seconds_of(started);
  process.cpu_seconds = seconds_of(in_user + in_kernel);
  process.resident_bytes = static_cast<uint64_t>(std::max<int64_t>(0, pages)) * static_cast<uint64_t>(std::max(1L, sysconf(_SC_PAGESIZE)));
  return process;
}

std::vector<std::string> command_line_of(int64_t pid) {
  const std::string text = content_of(folder_of(pid) + "/cmdline");
  std::vector<std::string> all;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\0', at), text.size());
    all.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return all;
}

std::string working_folder_of(int64_t pid) {
  char path[PATH_MAX];
  const ssize_t length = readlink((folder_of(pid) + "/cwd").c_str(), path, sizeof path);
  return length > 0 && length < static_cast<ssize_t>(sizeof path) ? std::string(path, static_cast<size_t>(length)) : std::string();
}

MachineState machine_state() {
  MachineState machine;
  std::istringstream stat(content_of("/proc/stat"));
  std::string line;
  while (std::getline(stat, line) && line.starts_with("cpu")) {
    std::istringstream words(line);
    std::string name;
    words >> name;
    if (name != "cpu") {
      ++machine.cpus;
      continue;
    }
    // user nice system idle iowait irq softirq steal; guests' time is in the first two.
    uint64_t ticks = 0;
    for (int i = 0; i < 8 && words >> ticks; ++i) {
      machine.all_seconds += seconds_of(ticks);
      if (i != 3 && i != 4) machine.busy_seconds += seconds_of(ticks);
    }
  }
  std::istringstream(content_of("/proc/loadavg")) >> machine.load;
  std::istringstream memory(content_of("/proc/meminfo"));
  while (std::getline(memory, line)) {
    std::istringstream words(line);
    std::string name;
    uint64_t kib = 0;
    words >> name >> kib;
    if (name == "MemTotal:") machine.memory_bytes = kib * 1024;
    if (name == "MemAvailable:") machine.memory_available_bytes = kib * 1024;
  }
  return machine;
}

}  // namespace fattn::measure
