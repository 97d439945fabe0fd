// A sampler whose contestant's GPU is watched: which clock it held and what power it drew while it computed that.
#pragma once

#include <utility>
#include <vector>

#include "measure/gpu_sensors.h"
#include "measure/sampling.h"

namespace fattn::measure {

// The numbers are those of the device under this load: of its samples, with the L2 cache flushed before each if samples are taken so. They are no
// average over the samples, but the median of the few moments that the driver measured, and say nothing of single calls. No reading lies inside a
// sample that it could disturb: where calls are shorter than kUndisturbedSeconds, none is taken before the samples of the last turn are there. Where
// the turns gave none, calls are repeated behind the last one, untimed, until there is one: 80 ms on average, kMostSeconds and a call at most. The
// clock of a load that the device's power limit slows down may then be lower than in the samples, since it falls for as long as such a load lasts.
class MeteredSampler {
 public:
  static constexpr double kUndisturbedSeconds = 1e-3, kMostSeconds = 0.15, kPartSeconds = 0.025;

  // No readings if `sensors` is null.
  MeteredSampler(Sampler sampler, const GpuSensors* sensors) : sampler_(std::move(sampler)), sensors_(sensors) {}

  std::vector<double> operator()(int samples, int warmup);
  // To be called directly after the samples of a turn; those of warm-up are no turn, and their readings are dropped.
  void end_turn(bool last);
  GpuReading median() const { return median_of(readings_); }

 private:
  Sampler sampler_;
  const GpuSensors* sensors_;
  double call_seconds_ = 0;    // of the last samples
  double period_seconds_ = 0;  // of a call with all that belongs to it
  GpuWatch::Clock::time_point busy_since_;
  std::vector<GpuReading> readings_, of_turn_;
};

}  // namespace fattn::measure
