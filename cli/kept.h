// What a long command has measured, for Ctrl-C: a call in hand may take minutes, so a thread of its own writes the record so far and ends the
// program.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>

#include "cli/interrupt.h"
#include "measure/record.h"

namespace fattn::cli {

// While it lives, SIGINT, SIGTERM and SIGHUP write what was kept last and end the program with 128 + the signal's number; a second one ends it before
// that is done. Threads that start meanwhile never take these signals.
class Kept {
 public:
  // `file_or_dash`: where the record goes, "" for nowhere.
  explicit Kept(std::string file_or_dash);
  ~Kept();
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;

  // The record so far; `what` is in it: "12 of 60 problems".
  void keep(measure::Record record, const std::string& what);
  // The same of a record that is JSON already, made when it is needed.
  void keep(std::function<nlohmann::ordered_json()> record, const std::string& what);

  // Done before an interrupt ends the program, whatever else fails.
  void before_end(std::function<void()> last);

 private:
  void watch();
  [[noreturn]] void end(int signal);

  const std::string file_;
  const SignalsBlocked blocked_;
  std::mutex mutex_;
  std::function<nlohmann::ordered_json()> record_;
  std::string what_;
  std::function<void()> last_;
  std::atomic<bool> ended_{false};
  std::thread watcher_;
};

}  // namespace fattn::cli
