// How long a measurement will take and still takes, and what is said of a machine that was not this program's alone.
#include <gtest/gtest.h>
#include <sched.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "measure/disturbance.h"
#include "measure/estimate.h"
#include "measure/remaining_time.h"
#include "temporary_folder.h"

namespace fattn::measure {
namespace {

TEST(RemainingTime, SaysNothingWhileNobodyKnows) {
  RemainingTime time;
  EXPECT_EQ(time.left(0), std::nullopt);
  time.expect(10, false);
  time.done(1, 0.5);
  EXPECT_EQ(time.left(0.5), std::nullopt);
  time.done(1, 2);
  ASSERT_TRUE(time.left(2));
  EXPECT_NEAR(*time.left(2), 8, 0.01);
  EXPECT_NEAR(time.share(), 0.2, 1e-12);
}

// Steps that take `factor` times as long as expected, in turns of short and long ones; looked at ten times a second.
struct Watched {
  double highest_rise = 0, of_half = 0, end = 0, duration = 0;
};
Watched watch(double factor) {
  RemainingTime time;
  std::vector<double> weights;
  for (int i = 0; i < 40; ++i) weights.push_back(i % 4 == 0 ? 6 : 1);
  double total = 0, now = 0, next_look = 0, last = 1e9;
  for (double weight : weights) total += weight;
  Watched watched;
  watched.duration = factor * total;
  time.expect(total, true);
  for (size_t i = 0; i < weights.size(); ++i) {
    const double noise = i % 3 == 0 ? 1.3 : 0.85, end = now + factor * weights[i] * noise;
    for (; next_look < end; next_look += 0.1) {
      const double left = *time.left(next_look);
      watched.highest_rise = std::max(watched.highest_rise, left - last);
      last = left;
      if (watched.of_half == 0 && next_look >= watched.duration / 2) watched.of_half = left;
    }
    now = end;
    time.done(weights[i], now);
  }
  watched.end = *time.left(now);
  return watched;
}

TEST(RemainingTime, IsSteadyAndBecomesRight) {
  for (const double factor : {0.5, 1.0, 2.0}) {
    const Watched watched = watch(factor);
    EXPECT_LE(watched.highest_rise, 0.0501) << factor << ": half a second more in a second at most";
    EXPECT_NEAR(watched.of_half / watched.duration, 0.5, 0.2) << factor;
    EXPECT_LT(watched.end, 0.05 * watched.duration) << factor;
  }
}

TEST(RemainingTime, ForgetsWhatWillNotBeDone) {
  RemainingTime time;
  time.expect(100, true);
  EXPECT_NEAR(*time.left(0), 100, 1);
  time.drop(90);
  time.done(5, 5);
  EXPECT_LT(*time.left(5), 60);
  time.done(5, 10);
  EXPECT_EQ(time.share(), 1);
}

TEST(Duration, IsSaidInWords) {
  EXPECT_EQ(duration_in_words(0), "1 second");
  EXPECT_EQ(duration_in_words(42.4), "42 seconds");
  EXPECT_EQ(duration_in_words(60), "1 minute");
  EXPECT_EQ(duration_in_words(90), "90 seconds");
  EXPECT_EQ(duration_in_words(12 * 60), "12 minutes");
  EXPECT_EQ(duration_in_words(3600), "1 hour");
  EXPECT_EQ(duration_in_words(3 * 3600), "3 hours");
  EXPECT_EQ(duration_in_words(33 * 86400), "33 days");
  EXPECT_EQ(duration_in_words(1e30), "more than 100000 years");
  EXPECT_EQ(duration_in_words(NAN), "more than 100000 years");
}

TEST(Slice, IsAPartOfTheProblem) {
  ProblemSpec s;
  s.batch = 8, s.nheads = 12, s.nheads_k = 4, s.seqlen_q = s.seqlen_k = 1024, s.causal = true;
  const double all = cost_of(s, Pass::kForward).flops;
  EXPECT_EQ(slice_of(s, 2 * all), s);
  ProblemSpec some = slice_of(s, all / 3);
  EXPECT_EQ(some.batch, 2);
  EXPECT_EQ(some.nheads, 12);
  EXPECT_EQ(some.seqlen_q, 1024) << "a shorter sequence would say less";
  some = slice_of(s, all / 16);
  EXPECT_EQ(some.batch, 1);
  EXPECT_EQ(some.nheads_k * 3, some.nheads);
  for (const double target : {2e5, 1e6, 1e7}) {
    const double flops = cost_of(slice_of(s, target), Pass::kForward).flops;
    EXPECT_LE(flops, 1.1 * target);
    EXPECT_GT(flops, 0.5 * target);
  }
  s.batch = 5, s.least_packed = 100, s.causal = false;
  some = slice_of(s, 1e6);
  EXPECT_EQ(some.seqlen_q, some.seqlen_k);
  EXPECT_LE(some.least_packed, some.seqlen_q);
  s.least_packed = 0, s.window_left = 100, s.window_right = 0, s.seqlen_q = s.seqlen_k = 1 << 20;
  EXPECT_LE(cost_of(slice_of(s, 1e6), Pass::kForward).flops, 1.1e6);
}

// Takes the time of its FLOPs, and a little for the start.
class Fake final : public Contestant {
 public:
  double flops_per_s = 1e11, start = 2e-5, computed = 0;
  bool fits = true;

  Identity identity() const override { return {}; }
  void accept(const ProblemSpec&, bool, int64_t) override {
    if (!fits) throw Failure(Status::kOutOfMemory, "too large");
  }
  void prepare(const ProblemSpec& spec, const Inputs&, bool, int64_t) override { spec_ = spec; }
  MemoryUse memory(Pass) override { return {}; }
  const Outputs& compute() override { throw std::logic_error("not asked for"); }
  std::vector<double> time(Pass pass, int samples, int warmup) override {
    const double seconds = start + cost_of(spec_, pass).flops / flops_per_s;
    computed += seconds * (samples + warmup);
    return std::vector<double>(static_cast<size_t>(samples), seconds);
  }
  void release() override {}

 private:
  ProblemSpec spec_;
};

TEST(Estimate, FollowsFromASmallPart) {
  ProblemSpec large;
  large.nheads = large.nheads_k = 2, large.seqlen_q = large.seqlen_k = 1 << 20;
  for (const double rate : {1e8, 1e10, 1e12}) {
    Fake fake;
    fake.flops_per_s = rate;
    const CallSeconds seconds = estimate_calls(fake, large, true, 0, {});
    EXPECT_NEAR(seconds.forward * rate / cost_of(large, Pass::kForward).flops, 1, 0.1) << rate;
    EXPECT_NEAR(seconds.backward * rate / cost_of(large, Pass::kBackward).flops, 1, 0.1) << rate;
    EXPECT_LT(fake.computed, 5) << "the estimate itself takes long";
  }
  Fake fake;
  fake.fits = false;
  EXPECT_EQ(estimate_calls(fake, large, true, 0, {}).forward, 0) << "who is refused takes no time";
}

TEST(Estimate, OfTheLibraryIsWithinAFactorOfTwo) {
  ProblemSpec s;
  s.nheads = s.nheads_k = 2, s.seqlen_q = s.seqlen_k = 3000;
  const auto library = make_library_contestant("fattn", {});
  // A few tries, because others may take the processors from one of the two.
  double ratio = 0;
  for (int tries = 0; tries < 5 && !(ratio > 0.5 && ratio < 2); ++tries) {
    const CallSeconds estimate = estimate_calls(*library, s, true, 0, {});
    const Inputs inputs = make_inputs(s, true);
    library->prepare(s, inputs, true, 0);
    ratio = (estimate.forward + estimate.backward) / library->time(Pass::kForwardBackward, 3, 1)[1];
    library->release();
  }
  EXPECT_GT(ratio, 0.5);
  EXPECT_LT(ratio, 2);
}

TEST(Estimate, CountsTheCallsThatAreMade) {
  for (const double once : {2e-5, 2e-3, 0.05, 0.4, 3.0}) {
    const SamplingOptions options;
    double spent = 0;
    const Sampler sampler = [&](int samples, int warmup) {
      spent += warmup * once + samples * std::max(once, kMinSampleSeconds);
      return std::vector<double>(static_cast<size_t>(samples), once);
    };
    sample_in_turns(
        {sampler, sampler}, options, [](size_t, const std::exception&) { FAIL(); }, [](size_t, bool) {});
    const SamplingSeconds expected = seconds_of(once, options);
    // Warm-up of a sampler that tells its time instead of taking it goes on until it is stable.
    const double warm_up = once >= options.warmup_seconds ? 3 * once : expected.warm_up;
    EXPECT_NEAR((warm_up + rounds_of(options) * expected.turn) / (spent / 2), 1, 0.1) << once;
  }
  const CallSeconds calls{2, 5};
  const StepSeconds steps = seconds_of_steps(calls, {Pass::kForward, Pass::kBackward}, true, SamplingOptions(), 0.5);
  EXPECT_EQ(steps.check, 0.5 + 7);
  EXPECT_EQ(steps.passes[0].memory, 2);
  EXPECT_EQ(steps.passes[1].memory, 7);
  // Warm-up and six samples of each.
  EXPECT_NEAR(steps.total(SamplingOptions()), 7.5 + 2 + 7 + 7 * 2 + 7 * 5, 1e-9);
}

// A tree of /proc and /sys that says what the test wants.
class Machine {
 public:
  explicit Machine(const std::string& root) : root_(root) {
    cpu_set_t set;
    CPU_ZERO(&set);
    sched_getaffinity(0, sizeof set, &set);
    for (int i = 0; i < CPU_SETSIZE; ++i)
      if (CPU_ISSET(i, &set)) cpus.push_back(i);
    write("proc/self/cgroup", "0::/box\n");
  }
  std::vector<int> cpus;
  // Each processor has been busy so long, in hundredths of a second.
  void busy(double ticks) {
    std::string text = "cpu  1 1 1 1\n";
    for (int cpu : cpus)
      text += "cpu" + std::to_string(cpu) + " " + std::to_string(static_cast<int64_t>(ticks)) + " 0 0 " + std::to_string(100000) + " 7 0 0 0 0 0\n";
    write("proc/stat", text);
  }
  void process(int id, int parent, int64_t ticks, const std::string& name = "a) (b") {
    write("proc/" + std::to_string(id) + "/stat", std::to_string(id) + " (" + name + ") R " + std::to_string(parent) + " 1 1 0 -1 0 0 0 0 0 " +
                                                      std::to_string(ticks - 3) + " 1 1 1 20 0 3 0 99\n");
  }
  void throttled(int times) {
    for (int cpu : cpus)
      write("sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/thermal_throttle/core_throttle_count", std::to_string(times) + "\n");
  }
  void quota(int64_t microseconds) {
    write("sys/fs/cgroup/box/cpu.stat", "usage_usec 1\nnr_throttled 3\nthrottled_usec " + std::to_string(microseconds) + "\n");
  }

 private:
  void write(const std::string& name, const std::string& text) {
    const std::filesystem::path path = std::filesystem::path(root_) / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  const std::string root_;
};

constexpr std::chrono::milliseconds kWatched{400};

TEST(Disturbance, IsWhatOthersUse) {
  const test::TemporaryFolder folder;
  Machine machine(folder.path().string());
  machine.busy(1000);
  machine.process(42, 1, 100);
  machine.process(43, 42, 100);
  machine.process(44, 43, 100);
  machine.process(50, 1, 100);
  const MachineWatch watch(folder.path().string(), 42);
  std::this_thread::sleep_for(kWatched);
  machine.busy(1000 + 40);
  machine.process(42, 1, 110);
  machine.process(44, 43, 105);  // a grandchild
  machine.process(45, 44, 5);    // a new one
  machine.process(50, 1, 130);   // others, however many
  const Disturbance found = watch.stop();
  const double busy = 0.4 * static_cast<double>(machine.cpus.size()), own = 0.2;
  EXPECT_EQ(found.cpus, static_cast<int>(machine.cpus.size()));
  ASSERT_TRUE(found.other_cpus());
  EXPECT_NEAR(*found.other_seconds, busy - own, 1e-6);
  EXPECT_NEAR(*found.other_cpus() * found.seconds, busy - own, 1e-6);
  EXPECT_FALSE(found.throttled);
  EXPECT_FALSE(found.quota_seconds);
}

TEST(Disturbance, SlowedDownProcessorsAreCounted) {
  const test::TemporaryFolder folder;
  Machine machine(folder.path().string());
  machine.busy(1000);
  machine.process(42, 1, 100);
  machine.throttled(5);
  machine.quota(1000000);
  const MachineWatch watch(folder.path().string(), 42);
  machine.throttled(7);
  machine.quota(3500000);
  const Disturbance found = watch.stop();
  EXPECT_FALSE(found.other_cpus()) << "the kernel's steps are too coarse for so little time";
  EXPECT_EQ(found.throttled, 2 * static_cast<int64_t>(machine.cpus.size()));
  EXPECT_EQ(found.quota_seconds, 2.5);
}

TEST(Disturbance, NothingIsMadeUpWhereTheKernelSaysNothing) {
  const test::TemporaryFolder folder;
  const MachineWatch watch(folder.path().string(), 42);
  std::this_thread::sleep_for(kWatched);
  const Disturbance found = watch.stop();
  EXPECT_FALSE(found.other_seconds || found.throttled || found.quota_seconds);
  EXPECT_EQ(warning_of(found, {}), "");
}

TEST(Disturbance, OfThisMachineIsKnown) {
  const MachineWatch watch;
  std::this_thread::sleep_for(kWatched);
  const Disturbance found = watch.stop();
  if (!found.other_cpus()) GTEST_SKIP() << "the kernel does not count processor time here";
  EXPECT_GE(*found.other_cpus(), 0);
  EXPECT_LE(*found.other_cpus(), found.cpus + 0.2);
}

Row sampled(std::vector<double> samples, const char* device = "cpu") {
  Row row;
  row.who.provider = "fattn", row.who.device = device;
  row.time = summarize(std::move(samples));
  return row;
}

Disturbance load(double other, int cpus) {
  Disturbance d;
  d.seconds = 2, d.cpus = cpus, d.other_seconds = 2 * other;
  return d;
}

TEST(Disturbance, OfAQuietMachineNothingIsSaid) {
  const Row quiet = sampled({1, 1.01, 1.02, 1.01, 1, 1.03, 1.2});
  EXPECT_EQ(warning_of(load(0.05, 2), {quiet}), "");
  EXPECT_EQ(warning_of(load(0.5, 16), {quiet}), "");
  EXPECT_EQ(warning_of(load(1, 2), {sampled({1, 1, 1, 1, 1, 1}, "cuda:0")}), "") << "the GPU was its own";
  EXPECT_EQ(warning_of({}, {sampled({1, 2})}), "") << "two samples say nothing of a spread";
  Row failed = sampled({1, 1, 2, 2, 3, 3});
  failed.fail({Status::kFailed, "x"});
  EXPECT_EQ(warning_of({}, {failed}), "");
  Row capped = sampled({1, 1, 1, 1, 1, 1}, "cuda:0");
  capped.gpu.held_back = kPowerCap;
  EXPECT_EQ(warning_of({}, {capped}), "") << "a GPU at its power limit is an everyday matter";
}

TEST(Disturbance, IsSaidInOneShortLine) {
  const Row restless = sampled({1, 1, 1.2, 1.2, 1.4, 1.4}), quiet = sampled({1, 1, 1, 1, 1, 1});
  EXPECT_EQ(warning_of(load(1.2, 2), {restless}), "Busy machine: other programs used 1.2 of 2 CPUs; repeat when it is quiet.");
  EXPECT_EQ(warning_of(load(0, 2), {quiet, restless}), "Restless machine: samples of fattn fwd spread by 33 %; repeat.");
  Disturbance hot = load(0, 2);
  hot.throttled = 3;
  EXPECT_NE(warning_of(hot, {quiet}).find("too hot"), std::string::npos);
  Disturbance held = load(0, 2);
  held.quota_seconds = 1.25;
  EXPECT_NE(warning_of(held, {quiet}).find("CPU quota"), std::string::npos);
  Row gpu = sampled({1, 1, 1, 1, 1, 1}, "cuda:0");
  gpu.gpu.held_back = 0x40 | kPowerCap;
  EXPECT_EQ(warning_of({}, {gpu}), "The GPU was slowed down by its temperature; repeat when it is not.");
  gpu.gpu.held_back = 0x8;
  Row long_name = restless;
  long_name.who.provider = "a-provider-with-a-long-name", long_name.pass = Pass::kForwardBackward;
  for (const std::string& line : {warning_of(load(123.4, 1024), {restless}), warning_of(load(0, 2), {long_name}), warning_of(hot, {quiet}),
                                  warning_of(held, {quiet}), warning_of({}, {gpu})}) {
    EXPECT_NE(line, "");
    EXPECT_LE(line.size(), 80u) << line;
  }
}

TEST(Disturbance, OfManyRacesIsTheirAverage) {
  Disturbance all;
  all.add(load(1, 2));
  Disturbance longer;
  longer.seconds = 6, longer.cpus = 2, longer.other_seconds = 1.5;
  all.add(longer);
  all.add({});
  EXPECT_NEAR(*all.other_cpus(), 0.4375, 1e-9);
  EXPECT_NEAR(all.seconds, 8, 1e-9);
  Disturbance little, many;
  little.seconds = 0.1, little.cpus = 2, little.other_seconds = 0.1;
  EXPECT_FALSE(little.other_cpus());
  for (int i = 0; i < 4; ++i) many.add(little);
  EXPECT_NEAR(*many.other_cpus(), 1, 1e-9);
  const auto json = to_json(all, {});
  EXPECT_EQ(json["warning"], "Busy machine: other programs used 0.4 of 2 CPUs; repeat when it is quiet.");
  EXPECT_TRUE(json["thermal_throttles"].is_null());
}

}  // namespace
}  // namespace fattn::measure
