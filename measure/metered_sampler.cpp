// When the readings are taken: in a turn, or behind the last one.
#include "measure/metered_sampler.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <optional>

#include "measure/statistics.h"

namespace fattn::measure {
namespace {

double seconds_since(GpuWatch::Clock::time_point start) { return std::chrono::duration<double>(GpuWatch::Clock::now() - start).count(); }

}  // namespace

std::vector<double> MeteredSampler::operator()(int samples, int warmup) {
  if (!sensors_) return sampler_(samples, warmup);
  of_turn_.clear();
  busy_since_ = GpuWatch::Clock::now();
  std::optional<GpuWatch> watch;
  if (call_seconds_ >= kUndisturbedSeconds) watch.emplace(*sensors_, busy_since_);
  std::vector<double> seconds = sampler_(samples, warmup);
  if (watch) of_turn_ = watch->stop();
  period_seconds_ = seconds_since(busy_since_) / (samples + warmup);
  call_seconds_ = summarize(seconds).median;
  return seconds;
}

void MeteredSampler::end_turn(bool last) {
  if (!sensors_) return;
  readings_.insert(readings_.end(), of_turn_.begin(), of_turn_.end());
  of_turn_.clear();
  if (!last || !readings_.empty()) return;
  try {
    const auto start = GpuWatch::Clock::now();
    GpuWatch watch(*sensors_, busy_since_);
    const int calls = static_cast<int>(std::clamp(kPartSeconds / std::max(period_seconds_, 1e-6), 1.0, 1000.0));
    while (!watch.found() && seconds_since(start) < kMostSeconds) sampler_(calls, 0);
    readings_ = watch.stop();
  } catch (const std::exception&) {
    readings_.clear();  // the samples are there: what was to be said of them besides is not worth them
  }
}

}  // namespace fattn::measure
