// Redraws at most ten times a second, so that stepping costs nothing, and every second in a long step.
#include "cli/progress.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>
#include <utility>

#include "cli/interrupt.h"
#include "cli/sanitize.h"
#include "cli/streams.h"
#include "cli/terminal.h"

namespace fattn::cli {
namespace {

constexpr std::chrono::milliseconds kSoonest{100}, kLatest{1000}, kLook{50};

}  // namespace

Progress::Progress(const std::string& label, int64_t total)
    : label_(printable(label, 40)), total_(std::max<int64_t>(total, 1)), visible_(takes_escapes(stderr)) {
  time_.expect(static_cast<double>(total_), false);
  begin();
}

Progress::Progress(const std::string& label) : label_(printable(label, 40)), total_(0), visible_(takes_escapes(stderr)) { begin(); }

void Progress::begin() {
  if (!visible_) return;
  draw(start_);
  const SignalsBlocked blocked;  // they are the main thread's
  clock_ = std::thread([this] {
    while (!ended_) {
      std::this_thread::sleep_for(kLook);
      const std::lock_guard lock(mutex_);
      if (const auto now = Clock::now(); !ended_ && now - drawn_ >= kLatest) draw(now);
    }
  });
}

Progress::~Progress() {
  ended_ = true;
  if (clock_.joinable()) clock_.join();
  if (visible_) std::fputs("\r\x1b[K", stderr);
}

void Progress::expect(double weight, bool in_seconds) {
  const std::lock_guard lock(mutex_);
  time_.expect(weight, in_seconds);
}

void Progress::drop(double weight) {
  const std::lock_guard lock(mutex_);
  time_.drop(weight);
}

void Progress::step(double weight) {
  if (!visible_) return;
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  ++done_;
  time_.done(weight, passed(now));
  if (now - drawn_ >= kSoonest || done_ == total_) draw(now);
}

void Progress::note(std::vector<std::string> parts) {
  if (!visible_) return;
  const std::lock_guard lock(mutex_);
  notes_ = std::move(parts);
}

void Progress::wipe() {
  if (!visible_) return;
  const std::lock_guard lock(mutex_);
  std::fputs("\r\x1b[K", stderr);
  drawn_ = {};
}

void Progress::say(const std::string& text) {
  const std::lock_guard lock(mutex_);
  put(stderr, fmt::format("{}{}: {}\n", visible_ ? "\r\x1b[K" : "", label_, printable(text, 600)));
  if (visible_) draw(Clock::now());
}

void Progress::draw(Clock::time_point now) {
  drawn_ = now;
  const std::string count =
      total_ > 0 ? fmt::format("{}/{}", std::min(done_, total_), total_) : fmt::format("{:.0f} %", std::floor(100 * time_.share()));
  const std::optional<double> left = time_.left(passed(now));
  std::string text = count + (left ? "  " + measure::duration_in_words(*left) + " left" : "");
  // A line that the terminal breaks cannot be erased: the bar takes what is left of it.
  constexpr size_t kWidth = 30, kWidthBesideNotes = 10, kBeside = 5;
  const size_t columns = width_of(stderr);
  const auto others = [&] { return label_.size() + text.size() + kBeside; };
  for (const std::string& part : notes_) {
    const std::string shown = printable(part, 60);
    if (others() + kWidthBesideNotes + 2 + shown.size() > columns) break;
    text += "  " + shown;
  }
  const size_t width = std::min(notes_.empty() ? kWidth : kWidthBesideNotes, columns - std::min(columns, others()));
  const auto filled = static_cast<size_t>(static_cast<double>(width) * time_.share());
  put(stderr, fmt::format("\r\x1b[K{} [{}{}] {}", label_, std::string(filled, '#'), std::string(width - filled, '.'), text));
}

}  // namespace fattn::cli
