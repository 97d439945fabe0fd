// Two records of the same measurement: what became slower, what faster, what stayed, and what cannot be said.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lab/ratio_interval.h"
#include "lab/record_file.h"

namespace fattn::lab {

constexpr int kRegressVersion = 1;

struct RegressOptions {
  double margin = 0.01;  // a share of the time: what is smaller is no change
  double level = 0.99;   // of one-sided bounds
  bool across_machines = false, across_flags = false, across_clocks = false;
  std::vector<std::pair<std::string, std::string>> match;  // contestants of the baseline that go by another name now
};

enum class Verdict { kWorse, kUndecided, kBetter, kSame, kFailed, kVanished, kAppeared };
const char* name_of(Verdict verdict);

// Of two times: worse if the bounded interval of the ratio lies wholly beyond 1 + margin, better if below 1 / (1 + margin), same if between these
// two.
Verdict verdict_of(const RatioInterval& interval, double margin);

// How two times of a row compare. No interval: `reason` says why there is none.
struct TimeChange {
  std::optional<RatioInterval> interval;
  bool paired = false, by_turns = false;  // by_turns: a turn is one observation
  std::string reason;
};
TimeChange change_of(const TimeOfRow& baseline, const TimeOfRow& current, bool same_run, double level);

struct RowVerdict {
  const RowOfRecord *baseline = nullptr, *current = nullptr;  // null: not there
  Verdict verdict = Verdict::kUndecided;
  std::string reason;  // of what is not said by the interval alone
  TimeChange time;
  const RowOfRecord& row() const { return current ? *current : *baseline; }
};

// What two records differ in that their comparison does not allow, a line each, each with the flag that allows it.
std::vector<std::string> obstacles(const MeasuredRecord& baseline, const MeasuredRecord& current, const RegressOptions& options);

// Rows refer to the records. Throws RecordError if no row is in both.
std::vector<RowVerdict> regress(const MeasuredRecord& baseline, const MeasuredRecord& current, const RegressOptions& options);

Json to_json(const std::vector<RowVerdict>& rows, const MeasuredRecord& baseline, const MeasuredRecord& current, const RegressOptions& options);

}  // namespace fattn::lab
