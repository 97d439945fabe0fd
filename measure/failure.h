// How a measurement ended: one status, and the exception that carries it to the row that it belongs to.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace fattn::measure {

enum class Status {
  kOk,
  kCheckFailed,  // ran, but its result is not within the bound: its times are not shown
  kRefused,      // ran, but its times cannot be true for this shape and machine
  kUnsupported,  // cannot compute this problem
  kUnavailable,  // is not there (no Python with torch, no OpenBLAS)
  kOutOfMemory,  // found by size before allocating, or by the allocator's own code
  kTimeout,
  kFailed,  // died, answered nonsense, or reported an error of its own
};

constexpr const char* name_of(Status status) {
  switch (status) {
    case Status::kOk: return "ok";
    case Status::kCheckFailed: return "check_failed";
    case Status::kRefused: return "refused";
    case Status::kUnsupported: return "unsupported";
    case Status::kUnavailable: return "unavailable";
    case Status::kOutOfMemory: return "out_of_memory";
    case Status::kTimeout: return "timeout";
    case Status::kFailed: return "failed";
  }
  return "failed";
}

class Failure : public std::runtime_error {
 public:
  // `absent`: of a contestant that is not here at all, for any problem: why not, in a few words ("no module named torch").
  Failure(Status status, const std::string& reason, std::string absent = {})
      : std::runtime_error(reason), status_(status), absent_(std::move(absent)) {}
  Status status() const noexcept { return status_; }
  const std::string& absent() const noexcept { return absent_; }

 private:
  Status status_;
  std::string absent_;
};

}  // namespace fattn::measure
