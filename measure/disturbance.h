// What kept the machine from being this program's alone while it was measured: other programs, processors that were slowed down.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "measure/record.h"

namespace fattn::measure {

struct Disturbance {
  double seconds = 0;                   // that were watched: those of the samples
  int cpus = 0;                         // processors that this program may run on
  std::optional<double> other_seconds;  // processor seconds on them of other programs, and what the host of a virtual machine took
  std::optional<int64_t> throttled;     // times that a processor's temperature slowed it down
  std::optional<double> quota_seconds;  // that the control group's quota held threads back, summed over them

  // Processors that others used on average; nothing of so little time that the kernel's steps are too coarse for it.
  std::optional<double> other_cpus() const;
  void add(const Disturbance& other);
};

// Watches from construction to `stop`. Numbers are the kernel's, in steps of a hundredth of a second. `root`: of /proc and
// /sys, for tests; `self`: the process whose use, and that of its children, is not other programs'.
class MachineWatch {
 public:
  explicit MachineWatch(std::string root = "", int self = 0);
  Disturbance stop() const;

 private:
  struct Counters {
    double seconds = 0;               // the clock
    std::optional<double> busy, own;  // processor seconds of everybody, and of this program
    std::optional<int64_t> throttled;
    std::optional<double> quota_seconds;
  };
  Counters read() const;

  const std::string root_;
  const int self_;
  std::vector<int> cpus_;
  Counters begin_;
};

// One line of at most 80 characters for people, or nothing where nothing disturbed: the gravest of load, slowed-down processors and samples that lie
// far apart.
std::string warning_of(const Disturbance& disturbance, const std::vector<Row>& rows);

nlohmann::ordered_json to_json(const Disturbance& disturbance, const std::vector<Row>& rows);

}  // namespace fattn::measure
