// Redraws at most ten times a second, so that stepping costs nothing.
#include "cli/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "cli/sanitize.h"

namespace fattn::cli {
namespace {

// Erasing a line needs a terminal that knows the escape sequence.
bool terminal() {
  const char* term = std::getenv("TERM");
  return isatty(STDERR_FILENO) == 1 && term && std::string_view(term) != "dumb";
}

}  // namespace

Progress::Progress(const std::string& label, int64_t total)
    : label_(printable(label, 40)), total_(std::max<int64_t>(total, 1)), visible_(terminal()) {
  if (visible_) draw(start_);
}

Progress::~Progress() {
  if (visible_) std::fputs("\r\x1b[K", stderr);
}

void Progress::step() {
  if (!visible_) return;
  const std::lock_guard lock(mutex_);
  done_ = std::min(done_ + 1, total_);
  const auto now = Clock::now();
  if (now - drawn_ >= std::chrono::milliseconds(100) || done_ == total_) draw(now);
}

void Progress::wipe() {
  if (!visible_) return;
  const std::lock_guard lock(mutex_);
  std::fputs("\r\x1b[K", stderr);
  drawn_ = {};
}

void Progress::say(const std::string& text) {
  const std::lock_guard lock(mutex_);
  fmt::print(stderr, "{}{}: {}\n", visible_ ? "\r\x1b[K" : "", label_, printable(text, 600));
  std::fflush(stderr);
  if (visible_) draw(Clock::now());
}

void Progress::draw(Clock::time_point now) {
  drawn_ = now;
  constexpr int64_t width = 30;
  const auto filled = static_cast<size_t>(width * done_ / total_);
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  std::string left;
  if (done_ > 0 && elapsed > 1) left = fmt::format("  {:.0f} s left", elapsed * static_cast<double>(total_ - done_) / static_cast<double>(done_));
  fmt::print(stderr, "\r\x1b[K{} [{}{}] {}/{}{}", label_, std::string(filled, '#'), std::string(width - filled, '.'), done_, total_, left);
  std::fflush(stderr);
}

}  // namespace fattn::cli
