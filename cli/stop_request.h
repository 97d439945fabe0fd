// Ctrl-C in work that must come to a good end first: a step is finished and a checkpoint written, then the program ends as every other does.
#pragma once

#include <atomic>
#include <thread>

#include "cli/interrupt.h"

namespace fattn::cli {

// While it lives, SIGINT, SIGTERM and SIGHUP are only noted; a second one ends the program at once. Threads that start meanwhile never take them.
class StopRequest {
 public:
  StopRequest();
  ~StopRequest();
  StopRequest(const StopRequest&) = delete;
  StopRequest& operator=(const StopRequest&) = delete;

  // The signal that came; 0: none.
  int signal() const { return signal_; }

 private:
  void watch();

  const SignalsBlocked blocked_;
  std::atomic<int> signal_{0};
  std::atomic<bool> ended_{false};
  std::thread watcher_;
};

}  // namespace fattn::cli
