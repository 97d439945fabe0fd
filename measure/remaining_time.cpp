// An exponential average of when the work will be done, and a limit on how fast the answer may rise.
#include "measure/remaining_time.h"

#include <algorithm>
#include <cmath>

namespace fattn::measure {
namespace {

constexpr double kSilent = 1;         // seconds until steps of unknown length say anything
constexpr double kTrusted = 0.1;      // share of the expected time by which the expectation outweighs what was measured
constexpr double kMemory = 0.1;       // share of what is left in which the end follows the measurement
constexpr double kFastestRise = 0.5;  // seconds more a second

}  // namespace

void RemainingTime::expect(double weight, bool in_seconds) {
  total_ += weight;
  in_seconds_ = in_seconds;
}

void RemainingTime::drop(double weight) { total_ = std::max(done_, total_ - weight); }

double RemainingTime::share() const { return total_ > 0 ? std::min(1.0, done_ / total_) : 0; }

double RemainingTime::pace(double now) const {
  if (!in_seconds_) return now / done_;
  const double prior = 1 + kTrusted * total_;
  return (now + prior) / (done_ + prior);
}

void RemainingTime::done(double weight, double now) {
  done_ = std::min(total_, done_ + weight);
  if (!in_seconds_ && (done_ <= 0 || now < kSilent)) return;
  const double end = now + pace(now) * (total_ - done_);
  if (!end_) {
    end_ = end;
  } else {
    // The more of the rest has passed since, the more the new answer counts.
    const double follows = 1 - std::exp(-(now - moved_) / std::max(kMemory * (*end_ - moved_), 0.5));
    *end_ += follows * (end - *end_);
  }
  moved_ = now;
}

std::optional<double> RemainingTime::left(double now) {
  if (!end_) {
    if (!in_seconds_) return std::nullopt;
    end_ = total_;
    moved_ = now;
  }
  double left = std::max(*end_ - now, 0.0);
  if (shown_) left = std::min(left, *shown_ + kFastestRise * std::max(now - asked_, 0.0));
  shown_ = left;
  asked_ = now;
  return left;
}

std::string duration_in_words(double seconds) {
  struct Unit {
    double seconds, most;  // in seconds, up to which it is used
    const char* name;
  };
  constexpr double kMinute = 60, kHour = 3600, kDay = 24 * kHour, kYear = 365 * kDay;
  for (const Unit& unit : {Unit{1, 99.5, "second"},
                           {kMinute, 99.5 * kMinute, "minute"},
                           {kHour, 47.5 * kHour, "hour"},
                           {kDay, 700 * kDay, "day"},
                           {kYear, 1e5 * kYear, "year"}}) {
    // An hour is no 60 minutes.
    const bool one_larger = unit.seconds < kHour && std::fabs(seconds - 60 * unit.seconds) < unit.seconds / 2;
    if (!(seconds < unit.most) || one_larger) continue;
    const double count = std::max(1.0, std::round(seconds / unit.seconds));
    return std::to_string(static_cast<long long>(count)) + " " + unit.name + (count == 1 ? "" : "s");
  }
  return "more than 100000 years";
}

}  // namespace fattn::measure
