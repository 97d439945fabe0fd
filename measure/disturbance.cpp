// Counters of the kernel before and after: /proc/stat less this program's own time, thermal_throttle, the control group's cpu.stat.
#include "measure/disturbance.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <utility>

#include "measure/gpu_sensors.h"

namespace fattn::measure {
namespace {

constexpr double kFewestSeconds = 0.3;     // thirty of the kernel's steps
constexpr double kLoadThatMatters = 0.05;  // of all processors: what a desktop at rest does not use
constexpr double kLeastLoad = 0.1;
constexpr double kLoadThatStopsAHost = 0.9;  // a program that waits for a GPU needs little of a processor
constexpr double kQuotaThatMatters = 0.02;
constexpr double kSpreadThatMatters = 0.1;
constexpr size_t kFewestOfSpread = 6;

double ticks_to_seconds(double ticks) { return ticks / static_cast<double>(sysconf(_SC_CLK_TCK)); }

// The processors of a mask; of a machine with more than fit into one, none.
std::vector<int> usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> cpus;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return cpus;
  for (int i = 0; i < CPU_SETSIZE; ++i)
    if (CPU_ISSET(i, &set)) cpus.push_back(i);
  return cpus;
}

// Busy seconds of these processors: user nice system idle iowait irq softirq steal; those of guests are in user and nice. Kernels that do not count
// say 0 everywhere.
std::optional<double> busy_seconds(const std::string& root, const std::vector<int>& cpus) {
  std::ifstream file(root + "/proc/stat");
  double busy = 0, all = 0;
  size_t found = 0;
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("cpu", 0) != 0 || line.size() < 5 || line[3] < '0' || line[3] > '9') continue;
    std::istringstream words(line.substr(3));
    int cpu = 0;
    double numbers[8] = {};
    words >> cpu;
    for (double& number : numbers) words >> number;
    if (!std::binary_search(cpus.begin(), cpus.end(), cpu)) continue;
    ++found;
    for (int i = 0; i < 8; ++i) {
      all += numbers[i];
      if (i != 3 && i != 4) busy += numbers[i];
    }
  }
  if (found == 0 || found != cpus.size() || !(all > 0)) return std::nullopt;
  return ticks_to_seconds(busy);
}

// Of a process, of those of its children that have ended, and of all that descend from it.
std::optional<double> seconds_of_family(const std::string& root, int process) {
  struct Use {
    int parent = 0;
    double ticks = 0;
  };
  std::map<int, Use> all;
  std::error_code error;
  for (std::filesystem::directory_iterator it(root + "/proc", error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.empty() || name.find_first_not_of("0123456789") != std::string::npos) continue;
    std::ifstream file(it->path() / "stat");
    std::string line, skipped;
    std::getline(file, line);
    const size_t behind_name = line.rfind(')');  // a name may hold anything
    if (behind_name == std::string::npos) continue;
    std::istringstream words(line.substr(behind_name + 1));
    Use use;
    words >> skipped >> use.parent;
    for (int field = 5; field <= 13; ++field) words >> skipped;
    for (int field = 14; field <= 17; ++field) {  // utime stime cutime cstime
      double ticks = 0;
      words >> ticks;
      use.ticks += ticks;
    }
    if (words) all[std::atoi(name.c_str())] = use;
  }
  if (all.find(process) == all.end()) return std::nullopt;
  double ticks = 0;
  for (const auto& [id, use] : all) {
    int ancestor = id;
    // A process whose parent ended meanwhile, or is not ours to see, ends the search; so would a ring, which there is none of, after all steps.
    for (size_t steps = 0; ancestor != process && steps < all.size(); ++steps) {
      const auto up = all.find(ancestor);
      if (up == all.end()) break;
      ancestor = up->second.parent;
    }
    if (ancestor == process) ticks += use.ticks;
  }
  return ticks_to_seconds(ticks);
}

std::optional<int64_t> number_in(const std::filesystem::path& path) {
  std::ifstream file(path);
  int64_t number = 0;
  return file >> number ? std::optional(number) : std::nullopt;
}

// Processors of one core count together; what matters is whether the sum grows.
std::optional<int64_t> throttle_count(const std::string& root, const std::vector<int>& cpus) {
  std::optional<int64_t> sum;
  for (int cpu : cpus)
    if (const auto count = number_in(root + "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/thermal_throttle/core_throttle_count"))
      sum = sum.value_or(0) + *count;
  return sum;
}

// Of the control group that this program is in (version 2), or of the one that a container shows as its root.
std::optional<double> quota_seconds(const std::string& root) {
  std::ifstream groups(root + "/proc/self/cgroup");
  std::string own;
  for (std::string line; std::getline(groups, line);)
    if (line.rfind("0::", 0) == 0) own = line.substr(3);
  for (const std::string& group : {own, std::string()}) {
    std::ifstream file(root + "/sys/fs/cgroup" + group + "/cpu.stat");
    std::string key;
    for (double value = 0; file >> key >> value;)
      if (key == "throttled_usec") return value * 1e-6;
  }
  return std::nullopt;
}

template <class T>
std::optional<T> difference(const std::optional<T>& after, const std::optional<T>& before) {
  return after && before ? std::optional<T>(std::max<T>(0, *after - *before)) : std::nullopt;
}

// What is known of one period alone is not known of both.
template <class T>
std::optional<T> sum(const std::optional<T>& a, const std::optional<T>& b) {
  return a && b ? std::optional<T>(*a + *b) : std::nullopt;
}

const Row* widest(const std::vector<Row>& rows) {
  const Row* widest = nullptr;
  for (const Row& row : rows)
    if (row.ok() && row.time && row.time->samples >= kFewestOfSpread && (!widest || row.time->spread() > widest->time->spread())) widest = &row;
  return widest;
}

std::string line_of(const char* format, auto... values) {
  char line[160];
  std::snprintf(line, sizeof line, format, values...);
  return line;
}

std::string held_back_by(const std::vector<Row>& rows) {
  for (const Row& row : rows)
    for (const HeldBack& one : kHeldBack)
      if (one.bit != kPowerCap && (row.gpu.held_back & one.bit) != 0) return one.words;
  return {};
}

}  // namespace

std::optional<double> Disturbance::other_cpus() const {
  return other_seconds && seconds >= kFewestSeconds ? std::optional(*other_seconds / seconds) : std::nullopt;
}

void Disturbance::add(const Disturbance& other) {
  if (seconds == 0) {
    *this = other;
    return;
  }
  if (other.seconds == 0) return;
  other_seconds = sum(other_seconds, other.other_seconds);
  seconds += other.seconds;
  throttled = sum(throttled, other.throttled);
  quota_seconds = sum(quota_seconds, other.quota_seconds);
}

MachineWatch::MachineWatch(std::string root, int self)
    : root_(std::move(root)), self_(self > 0 ? self : static_cast<int>(getpid())), cpus_(usable_cpus()), begin_(read()) {}

MachineWatch::Counters MachineWatch::read() const {
  Counters now;
  now.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  now.busy = busy_seconds(root_, cpus_);
  now.own = seconds_of_family(root_, self_);
  now.throttled = throttle_count(root_, cpus_);
  now.quota_seconds = measure::quota_seconds(root_);
  return now;
}

Disturbance MachineWatch::stop() const {
  const Counters end = read();
  Disturbance found;
  found.seconds = end.seconds - begin_.seconds;
  found.cpus = static_cast<int>(cpus_.size());
  found.throttled = difference(end.throttled, begin_.throttled);
  found.quota_seconds = difference(end.quota_seconds, begin_.quota_seconds);
  const auto busy = difference(end.busy, begin_.busy), own = difference(end.own, begin_.own);
  if (busy && own) found.other_seconds = std::max(0.0, *busy - *own);
  return found;
}

std::string warning_of(const Disturbance& d, const std::vector<Row>& rows) {
  const bool on_gpu = !rows.empty() && rows.front().who.device != "cpu";
  const double matters = on_gpu ? kLoadThatStopsAHost * d.cpus : std::max(kLeastLoad, kLoadThatMatters * d.cpus);
  if (const auto others = d.other_cpus(); others && *others > matters)
    return line_of("Busy machine: other programs used %.1f of %d CPUs; repeat when it is quiet.", *others, d.cpus);
  if (const std::string cause = held_back_by(rows); !cause.empty())
    return line_of("The GPU was slowed down by %s; repeat when it is not.", cause.c_str());
  if (d.throttled && *d.throttled > 0 && !on_gpu) return "The processor was too hot and slowed down; repeat when it is cool.";
  if (d.quota_seconds && !on_gpu && *d.quota_seconds > kQuotaThatMatters * d.seconds)
    return line_of("The CPU quota of the control group held this program back for %.1f s.", *d.quota_seconds);
  const Row* const row = widest(rows);
  if (row && row->time->spread() > kSpreadThatMatters)
    return line_of("Restless machine: samples of %.16s %s spread by %.0f %%; repeat.", row->who.provider.c_str(), name_of(row->pass),
                   100 * row->time->spread());
  return {};
}

nlohmann::ordered_json to_json(const Disturbance& d, const std::vector<Row>& rows) {
  using Json = nlohmann::ordered_json;
  const auto known = [](const auto& value) { return value ? Json(*value) : Json(nullptr); };
  const std::string said = warning_of(d, rows);
  return {{"seconds", d.seconds},
          {"cpus", d.cpus},
          {"other_cpus", known(d.other_cpus())},
          {"thermal_throttles", known(d.throttled)},
          {"quota_seconds", known(d.quota_seconds)},
          {"warning", said.empty() ? Json(nullptr) : Json(said)}};
}

}  // namespace fattn::measure
