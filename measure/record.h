// A row of a record, what is derived from its times, and the record itself (docs/RECORD.md).
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "measure/contestant.h"
#include "measure/gpu_sensors.h"
#include "measure/peaks.h"
#include "measure/statistics.h"

namespace fattn::measure {

constexpr int kRecordVersion = 1;

struct TensorCheck {
  std::string tensor;
  double error = 0, allowed = 0;
  bool pass = false;
  std::string where;                   // the part of the problem that was compared with the oracle
  double rms_error = 0, rms_peer = 0;  // of that part, and FlashAttention-2's rounding there; 0 where that is not known
};

// How near a time is to the least that the machine's measured rates leave the problem (lab/ceiling.h).
struct CeilingShare {
  double seconds = 0;           // that least time, by the limit that takes longest
  std::string limit;            // its name
  double fraction = 0;          // of the time
  double accounted = 0;         // the share of the time that all limits make up, one after the other
  std::string rating;           // "good", "fair", "poor"; empty: it cannot be told
  std::optional<double> reach;  // `accounted` of the best that the library reached on this machine; not measured: nothing
  bool whole = false;           // rates of a calibration are in it, not of the run alone
};

// One contestant, one problem, one pass.
struct Row {
  ProblemSpec spec;
  Pass pass = Pass::kForward;
  Identity who;
  Status status = Status::kOk;
  std::string reason;  // of any other status
  std::string absent;  // of a contestant that is not here at all: Failure::absent
  Cost cost;
  std::optional<Statistics> time;
  std::optional<MemoryUse> memory;
  std::vector<TensorCheck> checks;
  std::vector<std::string> warnings;
  // Set by set_rates when the times are believed.
  std::optional<double> flops_per_s, flops_nominal_per_s, peak_fraction, bandwidth_fraction;
  std::string peak_name;
  double peak_flops_per_s = 0;  // what peak_fraction is a share of
  // Set by a comparison.
  std::optional<double> speedup_over_standard, max_difference_to_standard;
  std::optional<CeilingShare> ceiling;
  std::optional<double> moved_bytes;  // of the library, by the models of measure/traffic.h
  GpuReading gpu;                     // while it was timed: measure/metered_sampler.h says what that is

  bool ok() const { return status == Status::kOk; }
  // Turns the row into one of a failure: its times, rates and memory are dropped, what was checked stays.
  void fail(const Failure& failure);
};

// Rates from cost and median. Refuses (status kRefused with the reason) what cannot be: more than 1.05 times the peak that
// the machine has for this dtype, or a time that the clock cannot resolve.
void set_rates(Row& row, const Peaks& peaks);

// A warning where the resident set grew by clearly more than what was allocated: memory that nobody accounts for.
void compare_memory(Row& row);

// rows of the same problem and pass: speed-up over the row of provider "standard", of rows that are ok only.
void set_speedups(std::vector<Row>& rows);

// The index of the fastest ok row; others whose interval overlaps it are listed in `undecided_with`. -1: no row is ok.
struct Winner {
  int index = -1;
  std::vector<int> undecided_with;
};
Winner fastest(const std::vector<Row>& rows);
// Least extra_bytes among ok rows that know it. Within 1 % (or 64 KiB) of it is undecided.
Winner leanest(const std::vector<Row>& rows);

nlohmann::ordered_json to_json(const Row& row);

struct Record {
  std::string command;             // "bench", "compare", "suite"
  std::vector<std::string> flags;  // what repeats it
  Peaks peaks_before, peaks_after;
  std::vector<Row> rows;
  nlohmann::ordered_json summary;                // null for bench
  bool complete = true;                          // false: written while the suite was still running
  nlohmann::ordered_json disturbance = nullptr;  // measure/disturbance.h; null: nothing was watched
};
// "ok" if every row is, else the worst status among its rows in the order check_failed, refused, others.
nlohmann::ordered_json to_json(const Record& record);

}  // namespace fattn::measure
