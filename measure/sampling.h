// When to stop warming up, how often to repeat, and how one sample is taken.
#pragma once

#include <functional>
#include <vector>

namespace fattn::measure {

// A call shorter than this is repeated inside one sample, so that the clock's resolution stays below 0.1 % of it.
constexpr double kMinSampleSeconds = 50e-6;
constexpr int kMostCallsASample = 10000;
// So many samples give the median an interval of 95 %.
constexpr int kFewestSamples = 6;
// A call that lasts this long does not notice that another contestant has filled the caches before it.
constexpr double kColdCachesMatterSeconds = 0.1;

struct SamplingOptions {
  int repeats = 20;           // samples at least
  double min_seconds = 0.3;   // and this long in total
  double max_seconds = 3;     // fewer samples than `repeats` where they would last longer, but never fewer than kFewestSamples
  int max_samples = 500;      // unless that would be more samples than this
  int warmup = -1;            // untimed calls before the first sample; -1: until stable
  double warmup_seconds = 1;  // "until stable" gives up after this long
  int rounds = 5;             // contestants take turns this many times, so that a drift of the machine hits all of them
};

// What is taken of calls that last `once` seconds.
struct SamplePlan {
  int samples = 0;
  bool warm_again = false;  // an untimed call begins each turn: it brings the data back into the caches that others have filled
};
SamplePlan samples_of(double once, const SamplingOptions& options);
int rounds_of(const SamplingOptions& options);

// How long sample_in_turns takes for one of its samplers, whose calls last `once` seconds.
struct SamplingSeconds {
  double warm_up = 0, turn = 0;
};
SamplingSeconds seconds_of(double once, const SamplingOptions& options);

// Seconds a call, of `samples` samples after `warmup` untimed calls. std::chrono::steady_clock.
std::vector<double> time_calls(const std::function<void()>& call, int samples, int warmup);

// Something that can be sampled on demand, here or in another process: (samples, untimed calls first) -> seconds a call.
using Sampler = std::function<std::vector<double>(int samples, int warmup)>;

// What one sampler gave: seconds a call, and the median of each of its turns.
struct Samples {
  std::vector<double> seconds, turn_medians;
  std::vector<std::vector<double>> turns;  // what records keep of each
};

// Warms every sampler up, then takes their samples in turns. An exception of sampler i ends sampler i alone: it is handed
// to failed(i, exception), and result i is empty. `turn` is called after every turn of sampler i, for progress, and after its warm-up, which is no
// turn yet; before that, directly after the samples of a turn, `sampled` with i and whether it was the last of sampler i, whose exceptions are as the
// sampler's own.
std::vector<Samples> sample_in_turns(const std::vector<Sampler>& samplers, const SamplingOptions& options,
                                     const std::function<void(size_t, const std::exception&)>& failed,
                                     const std::function<void(size_t, bool warm_up)>& turn, const std::function<void(size_t, bool)>& sampled = {});

// The smallest step that the clock was seen to take.
double clock_resolution_seconds();

}  // namespace fattn::measure
