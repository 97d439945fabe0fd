// Warm-up, stop rules and interleaved sampling.
#include "measure/sampling.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <exception>
#include <thread>

#include "measure/statistics.h"

namespace fattn::measure {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Calls until two calls in a row lie within 5 % of the fastest so far. Returns the time of the last.
double warm_up(const Sampler& sampler, const SamplingOptions& options) {
  if (options.warmup >= 0) return sampler(1, options.warmup).front();
  const auto start = Clock::now();
  double fastest = sampler(1, 0).front(), last = fastest;
  for (int stable = 0; stable < 2 && seconds_since(start) < options.warmup_seconds;) {
    last = sampler(1, 0).front();
    fastest = std::min(fastest, last);
    stable = last <= 1.05 * fastest ? stable + 1 : 0;
  }
  return last;
}

constexpr std::chrono::milliseconds kTurnPause{5};

}  // namespace

SamplePlan samples_of(double once, const SamplingOptions& options) {
  const double sample = std::max(once, kMinSampleSeconds);
  const double affordable =
      std::clamp(options.max_seconds / sample, std::min<double>(kFewestSamples, options.repeats), static_cast<double>(options.repeats));
  const double most = std::max(options.repeats, options.max_samples);
  return {static_cast<int>(std::ceil(std::clamp(options.min_seconds / sample, affordable, most))), once < kColdCachesMatterSeconds};
}

int rounds_of(const SamplingOptions& options) { return std::max(1, std::min(options.rounds, options.repeats)); }

SamplingSeconds seconds_of(double once, const SamplingOptions& options) {
  const SamplePlan plan = samples_of(once, options);
  const double sample = std::max(once, kMinSampleSeconds), rounds = rounds_of(options);
  SamplingSeconds seconds;
  // A first call, and two in a row that are as fast, unless the first is as long as warm-up may be.
  constexpr int kCallsUntilStable = 3;
  if (options.warmup >= 0)
    seconds.warm_up = options.warmup * once + sample;
  else
    seconds.warm_up = once >= options.warmup_seconds ? once : kCallsUntilStable * sample;
  seconds.turn = plan.samples * sample / rounds + (plan.warm_again ? once : 0);
  return seconds;
}

std::vector<double> time_calls(const std::function<void()>& call, int samples, int warmup) {
  for (int i = 0; i < warmup; ++i) call();
  auto start = Clock::now();
  call();
  const double once = seconds_since(start);
  // One more call than needed by the first measurement, which is usually the slowest.
  const int calls = once >= kMinSampleSeconds
                        ? 1
                        : static_cast<int>(std::min(kMinSampleSeconds / std::max(once, 1e-9) + 1, static_cast<double>(kMostCallsASample)));
  std::vector<double> seconds;
  if (calls == 1) seconds.push_back(once);
  while (static_cast<int>(seconds.size()) < samples) {
    start = Clock::now();
    for (int i = 0; i < calls; ++i) call();
    seconds.push_back(seconds_since(start) / calls);
  }
  return seconds;
}

std::vector<Samples> sample_in_turns(const std::vector<Sampler>& samplers, const SamplingOptions& options,
                                     const std::function<void(size_t, const std::exception&)>& failed, const std::function<void(size_t, bool)>& turn,
                                     const std::function<void(size_t, bool)>& sampled) {
  const int rounds = rounds_of(options);
  std::vector<Samples> samples(samplers.size());
  std::vector<int> wanted(samplers.size(), 0);  // 0: failed
  std::vector<bool> warm_again(samplers.size(), false);
  auto guarded = [&](size_t i, auto&& body) {
    try {
      body();
    } catch (const std::exception& e) {
      samples[i] = {};
      wanted[i] = 0;
      failed(i, e);
    }
  };
  for (size_t i = 0; i < samplers.size(); ++i)
    guarded(i, [&] {
      const SamplePlan plan = samples_of(warm_up(samplers[i], options), options);
      wanted[i] = plan.samples;
      warm_again[i] = plan.warm_again;
      turn(i, true);
    });
  for (int round = 0; round < rounds; ++round)
    for (size_t i = 0; i < samplers.size(); ++i) {
      const int now_wanted = static_cast<int>(int64_t{wanted[i]} * (round + 1) / rounds - int64_t{wanted[i]} * round / rounds);
      if (now_wanted == 0) continue;
      guarded(i, [&] {
        // The untimed call brings this contestant's data back into the caches that the others have filled.
        const bool first = warm_again[i] && (samplers.size() > 1 || round == 0);
        // The threads of the one before may spin for a while after their last call (OpenMP's do for milliseconds).
        if (first && samplers.size() > 1) std::this_thread::sleep_for(kTurnPause);
        const std::vector<double> now = samplers[i](now_wanted, first ? 1 : 0);
        samples[i].seconds.insert(samples[i].seconds.end(), now.begin(), now.end());
        samples[i].turn_medians.push_back(summarize(now).median);
        samples[i].turns.push_back(kept_of_turn(now));
        if (sampled) sampled(i, round == rounds - 1);
      });
      if (wanted[i] > 0) turn(i, false);
    }
  return samples;
}

double clock_resolution_seconds() {
  double smallest = 1;
  for (int i = 0; i < 200; ++i) {
    const auto start = Clock::now();
    auto now = start;
    while (now == start) now = Clock::now();
    smallest = std::min(smallest, std::chrono::duration<double>(now - start).count());
  }
  return smallest;
}

}  // namespace fattn::measure
