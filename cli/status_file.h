// What a long command is doing, in a file for who watches it from elsewhere (docs/RECORD.md, "Status files").
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

#include "measure/remaining_time.h"

namespace fattn::cli {

// Written whole (a temporary file, then rename), when something changes and every two seconds between. Without a path it does nothing. A file that
// cannot be written later than at the beginning is no reason to lose measurements: it is left as it is.
class StatusFile {
 public:
  // Throws std::runtime_error if the file cannot be written now.
  StatusFile(std::string path, std::string command, int64_t steps, double seconds);
  ~StatusFile();  // the state is "failed" unless `end` was called
  StatusFile(const StatusFile&) = delete;
  StatusFile& operator=(const StatusFile&) = delete;

  void now(const std::string& what);  // "seqlen 1024: standard, fattn"
  void step(double seconds);          // one is done, for which so many seconds were expected
  void progress(double seconds);      // a part of one
  // One of many short ones is done, and what is being done: written with the next look, not now.
  void step_of_many(const std::string& what);
  void end(const std::string& state);  // "done", "interrupted"

 private:
  void write();
  double passed() const;

  const std::string path_, command_;
  const int64_t steps_;
  std::mutex mutex_;
  measure::RemainingTime time_;
  bool expected_;
  int64_t done_ = 0;
  std::string now_, state_ = "running";
  const int64_t start_ns_;
  std::atomic<bool> ended_{false};
  std::thread clock_;
};

}  // namespace fattn::cli
