#include "cli/kept.h"

#include <fmt/format.h>

#include <cstdio>
#include <ctime>
#include <exception>
#include <utility>

#include "cli/json_output.h"
#include "cli/sanitize.h"
#include "cli/streams.h"
#include "cli/terminal.h"

namespace fattn::cli {

Kept::Kept(std::string file_or_dash) : file_(std::move(file_or_dash)), watcher_([this] { watch(); }) {}

Kept::~Kept() {
  ended_ = true;
  watcher_.join();
}

void Kept::keep(measure::Record record, const std::string& what) {
  record.complete = false;
  keep([record = std::move(record)] { return to_json(record); }, what);
}

void Kept::keep(std::function<nlohmann::ordered_json()> record, const std::string& what) {
  const std::lock_guard lock(mutex_);
  record_ = std::move(record);
  what_ = what;
}

void Kept::before_end(std::function<void()> last) {
  const std::lock_guard lock(mutex_);
  last_ = std::move(last);
}

void Kept::watch() {
  const sigset_t signals = handled_signals();
  while (!ended_) {
    const timespec soon{0, 50'000'000};
    if (const int signal = sigtimedwait(&signals, nullptr, &soon); signal > 0) end(signal);
  }
}

void Kept::end(int signal) {
  const sigset_t signals = handled_signals();
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);  // a second one ends at once
  const std::lock_guard lock(mutex_);
  if (last_) last_();
  const char* wipe = takes_escapes(stderr) ? "\r\x1b[K" : "";
  if (!record_) {
    put(stderr, fmt::format("{}fattn: interrupted before anything was measured\n", wipe));
  } else if (file_.empty()) {
    put(stderr, fmt::format("{}fattn: interrupted after {}; with --json FILE the record of that is kept\n", wipe, printable(what_)));
  } else {
    try {
      write_json(record_(), file_);
      put(stderr,
          fmt::format("{}fattn: interrupted; {} has {}\n", wipe, file_ == "-" ? "the record" : "'" + printable(file_) + "'", printable(what_)));
    } catch (const std::exception& error) {
      put(stderr, fmt::format("{}fattn: interrupted after {}, which is lost: {}\n", wipe, printable(what_), printable(error.what())));
    }
  }
  std::fflush(stdout);
  end_program(signal);
}

}  // namespace fattn::cli
