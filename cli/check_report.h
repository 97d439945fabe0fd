// What `fattn check` tells of its cases: failures at once, a line for each group, and what it comes to in words.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/output.h"
#include "testing/check.h"

namespace fattn::cli {

enum class Outcome { kPassed, kFailed, kSkipped };
Outcome outcome_of(const testing::CaseResult& result);
const char* word_for(Outcome outcome);

// What a case is about, of few: "causal masks", "biases and masks".
std::string subject_of(const testing::Case& c);

class CheckReport {
 public:
  // `verbose`: every case is printed, not only those that fail. `random`: all are one subject.
  CheckReport(Output& out, bool verbose, bool random) : out_(out), verbose_(verbose), random_(random) {}

  bool prints(const testing::CaseResult& result) const { return verbose_ || outcome_of(result) == Outcome::kFailed; }
  void add(const testing::Case& c, const testing::CaseResult& result);
  void finish(double seconds);

  int64_t passed() const { return passed_; }
  int64_t failed() const { return failed_; }
  int64_t skipped() const { return skipped_; }
  const std::string& first_reason() const { return first_reason_; }  // of a case that was skipped

 private:
  struct Group {
    std::string dtype, subject, reason;  // the last: why the first one was skipped
    int64_t passed = 0, failed = 0, skipped = 0;
    double nearest = 0;  // the largest error over its bound
  };
  Group& group_of(const testing::Case& c);

  Output& out_;
  const bool verbose_, random_;
  std::vector<Group> groups_;
  int64_t passed_ = 0, failed_ = 0, skipped_ = 0;
  std::string first_reason_;
};

}  // namespace fattn::cli
