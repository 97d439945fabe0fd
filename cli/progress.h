// A progress line on stderr for long work; nothing at all when stderr is no terminal.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "measure/remaining_time.h"

namespace fattn::cli {

class Progress {
 public:
  // Work of `total` steps, which take about the same time.
  Progress(const std::string& label, int64_t total);
  // Work of which `expect` says later how long its steps may take.
  explicit Progress(const std::string& label);
  ~Progress();  // wipes the line
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // These are safe to call from several threads.
  void expect(double weight, bool in_seconds);  // as measure::RemainingTime's
  void step(double weight = 1);                 // one of the steps is done, of this weight
  void drop(double weight);                     // steps that will not be done
  void note(std::vector<std::string> parts);    // what is known of the work, behind the bar; the last parts are left out where lines are narrow
  void wipe();                                  // before something else is printed; the next step draws it anew
  void say(const std::string& text);            // a line of its own, also where stderr is no terminal

 private:
  using Clock = std::chrono::steady_clock;
  void begin();
  void draw(Clock::time_point now);
  double passed(Clock::time_point now) const { return std::chrono::duration<double>(now - start_).count(); }

  const std::string label_;
  const int64_t total_;  // steps that are counted; 0: a share is shown
  const bool visible_;
  std::mutex mutex_;
  int64_t done_ = 0;
  std::vector<std::string> notes_;
  measure::RemainingTime time_;
  const Clock::time_point start_ = Clock::now();
  Clock::time_point drawn_{};
  std::atomic<bool> ended_{false};
  std::thread clock_;  // redraws in long steps
};

}  // namespace fattn::cli
