#include "lab/profile/memory_track.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <map>

#include "lab/profile/recorder.h"

namespace fattn::lab::profile {
namespace {

constexpr std::chrono::milliseconds kEvery{5};
constexpr size_t kMostSamples = 4000;
constexpr int kMostProcesses = 256;

double resident_bytes(pid_t process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/statm");
  double size = 0, resident = 0;
  return file >> size >> resident ? resident * static_cast<double>(sysconf(_SC_PAGESIZE)) : 0;
}

// Of the process and all below it.
double resident_bytes_of_all(pid_t first) {
  std::vector<pid_t> processes{first};
  double total = 0;
  for (size_t i = 0; i < processes.size() && i < kMostProcesses; ++i) {
    total += resident_bytes(processes[i]);
    const std::string name = std::to_string(processes[i]);
    std::ifstream file("/proc/" + name + "/task/" + name + "/children");
    for (pid_t child = 0; file >> child;) processes.push_back(child);
  }
  return total;
}

}  // namespace

double MemoryTrack::peak_changes() const {
  double peak = 0;
  for (const MemoryChange& change : changes) peak = std::max(peak, change.total);
  return peak;
}

double MemoryTrack::peak_samples() const {
  double peak = 0;
  for (const MemorySample& sample : samples) peak = std::max(peak, sample.bytes);
  return peak;
}

std::vector<MemoryChange> memory_changes(const std::vector<TraceEvent>& events) {
  std::vector<MemoryChange> changes;
  std::map<int32_t, double> totals;
  for (const TraceEvent& e : events) {
    if (e.kind != EventKind::kMemory) continue;
    double& total = totals[e.device];
    total = std::max(0.0, total + e.bytes);  // what was allocated before anybody looked may be given back
    changes.push_back({e.begin_ns, e.bytes, total, e.name, e.device});
  }
  return changes;
}

MemoryWatch::MemoryWatch(pid_t process) : process_(process == 0 ? getpid() : process), thread_([this] { watch(); }) {}

void MemoryWatch::look() {
  const double bytes = resident_bytes_of_all(process_);
  const std::lock_guard lock(mutex_);
  if (bytes > 0) samples_.push_back({now_ns(), bytes});
}

void MemoryWatch::watch() {
  auto every = kEvery;
  while (!ended_) {
    look();
    {
      const std::lock_guard lock(mutex_);
      if (samples_.size() >= kMostSamples) {  // of each pair the larger one stays, and from now on half as many are taken
        for (size_t i = 0; i < samples_.size() / 2; ++i)
          samples_[i] = samples_[2 * i].bytes >= samples_[2 * i + 1].bytes ? samples_[2 * i] : samples_[2 * i + 1];
        samples_.resize(samples_.size() / 2);
        every *= 2;
      }
    }
    for (auto slept = std::chrono::milliseconds(0); slept < every && !ended_; slept += kEvery) std::this_thread::sleep_for(kEvery);
  }
}

std::vector<MemorySample> MemoryWatch::so_far() {
  const std::lock_guard lock(mutex_);
  return samples_;
}

std::vector<MemorySample> MemoryWatch::stop() {
  ended_ = true;
  if (thread_.joinable()) {
    thread_.join();
    look();
  }
  return so_far();
}

}  // namespace fattn::lab::profile
