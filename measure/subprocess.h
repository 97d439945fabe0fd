// A child process spoken to in lines, with a time limit on every answer.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace fattn::measure {

constexpr double kSlowSeconds = 10;  // people begin to wonder

class Subprocess {
 public:
  // Starts argv[0] (looked up in PATH). `variables` ("NAME=value") are added to the environment. Throws Failure(kUnavailable).
  explicit Subprocess(const std::vector<std::string>& argv, const std::vector<std::string>& variables = {});
  ~Subprocess();  // ends it, by force if it does not end by itself when its input does
  Subprocess(const Subprocess&) = delete;
  Subprocess& operator=(const Subprocess&) = delete;

  // Sends one line, and waits for one line; `ask` does both. `slow` is called once, if it has not come after kSlowSeconds. Throw Failure: kTimeout,
  // or kFailed with how the process ended and the end of what it wrote to stderr. After a Failure the process is gone.
  void send(const std::string& line, double timeout_seconds);
  std::string receive(double timeout_seconds, const std::function<void()>& slow = {});
  std::string ask(const std::string& line, double timeout_seconds) {
    send(line, timeout_seconds);
    return receive(timeout_seconds);
  }
  void stop();
  bool running() const { return pid_ > 0; }

 private:
  using Clock = std::chrono::steady_clock;
  // Until poll() has one of `events`; false if `until` comes first. Throws Failure(kTimeout) at the deadline.
  bool wait(short events, Clock::time_point until, Clock::time_point deadline, double timeout_seconds);
  [[noreturn]] void died(const std::string& doing);
  std::string error_output() const;

  pid_t pid_ = -1;
  int socket_ = -1;  // the child's stdin and stdout
  int stderr_ = -1;  // an anonymous file that holds the child's stderr
  std::string pending_;
};

}  // namespace fattn::measure
