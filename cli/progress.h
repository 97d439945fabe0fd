// A progress line on stderr for long work; nothing at all when stderr is no terminal.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

namespace fattn::cli {

class Progress {
 public:
  Progress(const std::string& label, int64_t total);
  ~Progress();  // wipes the line
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void step();                        // one of `total` is done; safe to call from several threads
  void wipe();                        // before something else is printed; the next step draws it anew
  void say(const std::string& text);  // a line of its own, also where stderr is no terminal

 private:
  using Clock = std::chrono::steady_clock;
  void draw(Clock::time_point now);

  const std::string label_;
  const int64_t total_;
  const bool visible_;
  std::mutex mutex_;
  int64_t done_ = 0;
  const Clock::time_point start_ = Clock::now();
  Clock::time_point drawn_{};
};

}  // namespace fattn::cli
