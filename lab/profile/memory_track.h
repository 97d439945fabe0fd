// Memory over time: changes that were recorded one by one, and a process's resident set, looked at every few milliseconds.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "lab/profile/event.h"

namespace fattn::lab::profile {

struct MemoryChange {
  int64_t ns = 0;
  double bytes = 0, total = 0;  // more or fewer; what is allocated then
  std::string what;
  int32_t device = -1;
};

struct MemorySample {
  int64_t ns = 0;
  double bytes = 0;
};

struct MemoryTrack {
  std::vector<MemoryChange> changes;
  std::vector<MemorySample> samples;  // of the resident set
  double peak_changes() const;
  double peak_samples() const;
  std::string samples_reason;  // why there are none
};

// Of the kMemory events, the running total of each device on its own.
std::vector<MemoryChange> memory_changes(const std::vector<TraceEvent>& events);

// Looks at the resident set of a process and all that it started, on a thread of its own, while it lives.
class MemoryWatch {
 public:
  explicit MemoryWatch(pid_t process = 0);
  ~MemoryWatch() { stop(); }
  MemoryWatch(const MemoryWatch&) = delete;
  MemoryWatch& operator=(const MemoryWatch&) = delete;

  std::vector<MemorySample> stop();
  std::vector<MemorySample> so_far();

 private:
  void watch();
  void look();

  const pid_t process_;
  std::atomic<bool> ended_{false};
  std::mutex mutex_;
  std::vector<MemorySample> samples_;
  std::thread thread_;
};

}  // namespace fattn::lab::profile
