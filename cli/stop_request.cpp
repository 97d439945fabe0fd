#include "cli/stop_request.h"

#include <cstdio>
#include <ctime>

#include "cli/terminal.h"

namespace fattn::cli {

StopRequest::StopRequest() : watcher_([this] { watch(); }) {}

StopRequest::~StopRequest() {
  ended_ = true;
  watcher_.join();
}

void StopRequest::watch() {
  const sigset_t signals = handled_signals();
  while (!ended_) {
    const timespec soon{0, 50'000'000};
    const int signal = sigtimedwait(&signals, nullptr, &soon);
    if (signal <= 0) continue;
    if (signal_ != 0) end_program(signal);
    signal_ = signal;
    std::fprintf(stderr, "%sfattn: ending after this step, with a checkpoint; once more ends at once\n", takes_escapes(stderr) ? "\r\x1b[K" : "");
  }
}

}  // namespace fattn::cli
