// What processors count: each a number, or the reason why there is none.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

namespace fattn::lab::profile {

struct Counter {
  std::string name, unit, words;  // "instructions", "", "instructions that were completed"
  std::optional<double> value;    // of one call (of a program: of all of it)
  std::string reason;             // why there is no value
  std::string source;             // "perf_event", "CUPTI Range Profiler", "the kernel"
  std::optional<double> model;    // what the models of `fattn memory` say, where they say something
  std::string model_words;
  std::optional<double> difference() const {
    if (!value || !model || !(*model > 0)) return std::nullopt;
    return *value / *model - 1;
  }
};

// Counters of the kernel's perf_event, of a process and of the threads and processes that it starts after this was made.
class PerfCounters {
 public:
  // `process`: 0 is this one. `from_exec`: they begin to count when the process calls exec, else at start().
  explicit PerfCounters(pid_t process = 0, bool from_exec = false);
  ~PerfCounters();
  PerfCounters(const PerfCounters&) = delete;
  PerfCounters& operator=(const PerfCounters&) = delete;

  void start();  // from 0
  void stop();
  // Numbers since start, divided by `calls`.
  std::vector<Counter> read(double calls = 1) const;

 private:
  struct Event {
    int descriptor = -1;
    std::string reason;
  };
  std::vector<Event> events_;
};

}  // namespace fattn::lab::profile
