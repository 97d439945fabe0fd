#include "cli/status_file.h"

#include <unistd.h>

#include <chrono>
#include <cmath>
#include <exception>
#include <optional>
#include <utility>

#include "cli/interrupt.h"
#include "cli/json_output.h"
#include "cli/sanitize.h"
#include "measure/environment.h"

namespace fattn::cli {
namespace {

constexpr std::chrono::milliseconds kStatusLook{100};
constexpr int kLooksBetweenWrites = 20;

int64_t steady_ns() { return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

StatusFile::StatusFile(std::string path, std::string command, int64_t steps, double seconds)
    : path_(std::move(path)), command_(std::move(command)), steps_(steps), expected_(seconds > 0), start_ns_(steady_ns()) {
  if (path_.empty()) return;
  require_writable(path_);
  time_.expect(seconds > 0 ? seconds : static_cast<double>(steps), seconds > 0);
  write();
  const SignalsBlocked blocked;  // they are the main thread's
  clock_ = std::thread([this] {
    for (int looks = 1; !ended_; ++looks) {
      std::this_thread::sleep_for(kStatusLook);
      const std::lock_guard lock(mutex_);
      if (!ended_ && looks % kLooksBetweenWrites == 0) write();
    }
  });
}

StatusFile::~StatusFile() {
  end("failed");
  if (clock_.joinable()) clock_.join();
}

double StatusFile::passed() const { return static_cast<double>(steady_ns() - start_ns_) * 1e-9; }

void StatusFile::now(const std::string& what) {
  if (path_.empty()) return;
  const std::lock_guard lock(mutex_);
  now_ = what;
  write();
}

void StatusFile::progress(double seconds) {
  if (path_.empty() || !expected_) return;
  const std::lock_guard lock(mutex_);
  time_.done(seconds, passed());
}

void StatusFile::step(double seconds) {
  if (path_.empty()) return;
  const std::lock_guard lock(mutex_);
  ++done_;
  time_.done(expected_ ? seconds : 1, passed());
  write();
}

void StatusFile::step_of_many(const std::string& what) {
  if (path_.empty()) return;
  const std::lock_guard lock(mutex_);
  now_ = what;
  ++done_;
  time_.done(1, passed());
}

void StatusFile::end(const std::string& state) {
  if (path_.empty()) return;
  const std::lock_guard lock(mutex_);
  if (ended_.exchange(true)) return;
  state_ = state;
  now_.clear();
  write();
}

void StatusFile::write() {
  const std::optional<double> left = state_ == "running" ? time_.left(passed()) : std::nullopt;
  const nlohmann::ordered_json status = {{"fattn_status", 1},
                                         {"command", command_},
                                         {"state", state_},
                                         {"step", done_},
                                         {"of", steps_},
                                         {"now", now_.empty() ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(printable(now_, 200))},
                                         {"seconds_left", left ? nlohmann::ordered_json(std::ceil(*left)) : nlohmann::ordered_json(nullptr)},
                                         {"updated_at", measure::now_utc()},
                                         {"pid", static_cast<int64_t>(getpid())}};
  try {
    write_json(status, path_);
  } catch (const std::exception&) {  // a full disk: the measurement goes on
  }
}

}  // namespace fattn::cli
