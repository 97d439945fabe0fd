// The conductor of bench, compare and the suite.
#include "cli/race.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <utility>

#include "cli/contestants.h"
#include "cli/oracle_check.h"
#include "cli/schedule.h"
#include "cli/usage_error.h"
#include "fattn/plan.hpp"
#include "fattn/system.hpp"
#include "lab/plan_shape.h"
#include "measure/library_plans.h"
#include "measure/metered_sampler.h"
#include "measure/traffic.h"

namespace fattn::cli {
namespace {

using namespace measure;

// What is left of --time-limit. A provider may take half of what is left at most, so that one that hangs leaves the others something.
class TimeLeft {
 public:
  TimeLeft(double seconds, std::function<void(const std::string&)> tell) : limited_(seconds > 0), limit_(seconds), tell_(std::move(tell)) {}

  // For all contestants together to get ready; the rest is for their samples.
  void get_ready(Contestant& contestant, bool last) const { grant(contestant, kReady * limit_, last ? 1 : 0.5); }
  // One that was ready in time may end what it has begun: samples that are there are not lost to a limit that is nearly over.
  void measure(Contestant& contestant) const { grant(contestant, limit_, 0.5, kAnswerSeconds); }
  void let_go(Contestant& contestant) const { grant(contestant, limit_, 0, kAnswerSeconds); }

  SamplingOptions fitting(SamplingOptions sampling, size_t turns) const {
    if (!limited_) return sampling;
    const double each = std::max(limit_ - passed(), 0.0) / static_cast<double>(std::max<size_t>(turns, 1));
    sampling.max_seconds = std::min(sampling.max_seconds, 0.7 * each);
    sampling.min_seconds = std::min(sampling.min_seconds, sampling.max_seconds);
    sampling.warmup_seconds = std::min(sampling.warmup_seconds, 0.15 * each);
    return sampling;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr double kReady = 0.8, kAnswerSeconds = 5;

  double passed() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

  void grant(Contestant& contestant, double end, double share, double least = 0) const {
    Patience patience{std::nullopt, tell_};
    if (limited_) {
      const double seconds = std::max(least, share * std::max(end - passed(), 0.0));
      patience.until = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    }
    contestant.wait_by(patience);
  }

  const Clock::time_point start_ = Clock::now();
  const bool limited_;
  const double limit_;
  const std::function<void(const std::string&)> tell_;
};

bool concerns(const TensorCheck& check, Pass pass) {
  const bool gradient = check.tensor != "o" && check.tensor != "lse";
  return pass == Pass::kForwardBackward || gradient == (pass == Pass::kBackward);
}

// The largest difference to the standard algorithm's result in the same dtype, over the tensors that the pass returns.
double difference(const Outputs& mine, const Outputs& standard, const ProblemSpec& s, Pass pass) {
  double largest = 0;
  auto tensor = [&](const Pages& a, const Pages& b, int64_t bytes) {
    if (bytes > 0) largest = std::max(largest, max_difference(a.data(), b.data(), s.dtype, bytes / static_cast<int64_t>(size_of(s.dtype))));
  };
  if (pass != Pass::kBackward) tensor(mine.o, standard.o, s.o_bytes());
  if (pass != Pass::kForward) {
    tensor(mine.dq, standard.dq, s.q_bytes());
    tensor(mine.dk, standard.dk, s.k_bytes());
    tensor(mine.dv, standard.dv, s.v_bytes());
  }
  return largest;
}

Outputs copy_of(const Outputs& from) {
  Outputs to;
  auto copy = [](Pages& a, const Pages& b) {
    a = Pages(b.size());
    std::copy_n(static_cast<const char*>(b.data()), b.size(), static_cast<char*>(a.data()));
  };
  copy(to.o, from.o);
  copy(to.dq, from.dq);
  copy(to.dk, from.dk);
  copy(to.dv, from.dv);
  return to;
}

struct Planned {
  Isa isa = Isa::kAuto;
  int threads = 0;
};

Planned plan_of(const ProblemSpec& spec, Options options) {
  spec.apply_to(options);
  try {
    const fattn_plan_info info = Plan(forward_tensors(spec, {}), options).info();
    return {static_cast<Isa>(info.cpu_isa), info.num_threads};
  } catch (const Error&) {  // its row says why; others may still run
    return {Isa::kAuto, options.num_threads > 0 ? options.num_threads : cpu_info().usable_threads};
  }
}

Peaks peaks_of(const ProblemSpec& spec, const RaceOptions& options) {
  if (options.place.device == Device::kCuda) return measure_cuda_peaks(options.place.index);
  const Planned planned = plan_of(spec, options.library);
  Peaks peaks = measure_peaks(planned.isa, planned.threads, options.pains());
  peaks.read_bytes_per_s = options.read_bytes_per_s;
  return peaks;
}

// Of the calibration that is kept; its exponentials are of one instruction set.
lab::CeilingRates ceilings_of(const Peaks& peaks, const RaceOptions& options) {
  const bool cuda = options.place.device == Device::kCuda;
  const Isa calibrated = cuda ? Isa::kAuto : static_cast<Isa>(cpu_info().isa_default);
  if (cuda || peaks.isa == calibrated) return lab::kept_ceiling_rates(options.place, peaks.threads);
  lab::CeilingRates rates;
  rates.lacks = fmt::format("a calibration is of instruction set {}, and this is {}", name_of(calibrated), name_of(peaks.isa));
  return rates;
}

// What standard attention returned, and of which problem.
struct Standard {
  Outputs outputs;
  const ProblemSpec* spec = nullptr;
};

// Of the plans of `who`, for models of traffic.
CudaTiles tiles_of(const Identity& who, const ProblemSpec& spec, Pass pass, const RaceOptions& options) {
  Options asked = options.library;
  asked.algorithm = algorithm_named(who.algorithm).value_or(asked.algorithm);
  return lab::cuda_tiles(spec, pass, asked, options.place);
}

void check(Entry& entry, const RaceOptions& options, Standard& standard) {
  const ProblemSpec& spec = *entry.spec;
  const Outputs* outputs = nullptr;
  const std::vector<TensorCheck> checks =
      check_against_oracle(*entry.contestant, spec, *entry.inputs, entry.grad, options.memory_limit, options.oracle_flops, outputs);
  const Identity who = entry.contestant->identity();
  if (who.provider == "standard") standard = {copy_of(*outputs), &spec};
  for (Row* row : entry.rows) {
    row->who = who;
    if (!row->ok()) continue;  // a pass that it has not
    if (!who.kernel_forward.empty())
      row->moved_bytes = options.place.device == Device::kCuda ? moved_bytes(who.algorithm, spec, row->pass, tiles_of(who, spec, row->pass, options))
                         : who.backend == name_of(Backend::kCpu) ? moved_bytes_cpu(who.algorithm, who.isa, spec, row->pass)
                                                                 : std::nullopt;
    for (const TensorCheck& c : checks)
      if (concerns(c, row->pass)) row->checks.push_back(c);
    if (standard.spec && *standard.spec == spec) row->max_difference_to_standard = difference(*outputs, standard.outputs, spec, row->pass);
  }
  const auto bad = std::find_if(checks.begin(), checks.end(), [](const TensorCheck& c) { return !c.pass; });
  if (bad != checks.end())
    throw Failure(Status::kCheckFailed,
                  fmt::format("{} differs from the oracle by {:.3g}; allowed: {:.3g} ({})", bad->tensor, bad->error, bad->allowed, bad->where));
}

void time_pass(std::vector<Entry>& entries, size_t pass_index, Pass pass, const RaceOptions& options, const GpuSensors* sensors, const TimeLeft& left,
               const Schedule& schedule) {
  std::vector<MeteredSampler> metered;
  std::vector<Entry*> running;
  for (Entry& entry : entries) {
    if (!entry.has(pass_index)) continue;
    running.push_back(&entry);
    metered.emplace_back(
        [&entry, pass, &left](int samples, int warmup) {
          left.measure(*entry.contestant);
          return entry.contestant->time(pass, samples, warmup);
        },
        sensors);
  }
  std::vector<Sampler> samplers;
  samplers.reserve(metered.size());
  for (MeteredSampler& one : metered) samplers.emplace_back(std::ref(one));
  const SamplingOptions sampling = left.fitting(options.sampling, running.size() * (options.passes.size() - pass_index));
  const auto samples = sample_in_turns(
      samplers, sampling,
      [&](size_t i, const std::exception& e) {
        running[i]->fail(as_failure(e));
        schedule.forget(*running[i]);
      },
      [&](size_t i, bool warm_up) {
        const SamplingSeconds& expected = running[i]->steps.passes[pass_index].sampling;
        schedule.step(*running[i], warm_up ? expected.warm_up : expected.turn);
      },
      [&](size_t i, bool last) { metered[i].end_turn(last); });
  for (size_t i = 0; i < running.size(); ++i)
    if (!samples[i].seconds.empty()) {
      Statistics time = summarize(samples[i].seconds);
      time.turn_medians = samples[i].turn_medians;
      time.turn_samples = samples[i].turns;
      running[i]->rows[pass_index]->time = std::move(time);
      running[i]->rows[pass_index]->gpu = metered[i].median();
    }
}

// What was measured of the first `passes` passes, for who may be interrupted.
void keep_passes(const RaceResult& result, size_t passes, size_t contestants, const RaceOptions& options) {
  RaceResult so_far;
  so_far.before = so_far.after = result.before;
  so_far.rows.assign(result.rows.begin(), result.rows.begin() + static_cast<std::ptrdiff_t>(passes * contestants));
  for (Row& row : so_far.rows) {
    set_rates(row, result.before);
    compare_memory(row);
  }
  lab::rate_rows(so_far.rows, result.ceilings, result.before);
  options.keep(so_far, fmt::format("{} of {} passes", passes, options.passes.size()));
}

}  // namespace

int planned_threads(const ProblemSpec& spec, const Options& options) { return plan_of(spec, options).threads; }

RaceResult race(const ProblemSpec& spec, const std::vector<Contestant*>& contestants, const RaceOptions& options) {
  std::vector<Entrant> entrants;
  entrants.reserve(contestants.size());
  for (Contestant* contestant : contestants) entrants.push_back({contestant, spec});
  return race(entrants, options);
}

RaceResult race(const std::vector<Entrant>& entrants, const RaceOptions& options) {
  RaceResult result;
  result.rows.resize(options.passes.size() * entrants.size());
  std::vector<Entry> entries(entrants.size());
  for (size_t c = 0; c < entrants.size(); ++c) {
    entries[c].contestant = entrants[c].contestant;
    entries[c].spec = &entrants[c].spec;
    for (size_t p = 0; p < options.passes.size(); ++p) {
      Row& row = result.rows[p * entrants.size() + c];
      row.spec = entrants[c].spec;
      row.pass = options.passes[p];
      row.cost = cost_of(row.spec, row.pass);
      row.who = entrants[c].contestant->identity();
      entries[c].rows.push_back(&row);
    }
  }
  // Those of the same problem have the same inputs.
  std::vector<const ProblemSpec*> problems;
  for (const Entry& entry : entries)
    if (std::none_of(problems.begin(), problems.end(), [&](const ProblemSpec* one) { return *one == *entry.spec; })) problems.push_back(entry.spec);

  try {
    int64_t bytes = 0;
    for (const ProblemSpec* spec : problems) {
      if (__builtin_add_overflow(bytes, spec->input_bytes(options.grad), &bytes))
        throw Failure(Status::kOutOfMemory, "the inputs together have more bytes than any machine can address");
      require_memory(bytes, options.memory_limit, "q, k, v" + std::string(options.grad ? " and dout" : "") + " for " + describe(*spec));
    }
  } catch (const Failure& failure) {  // nobody can run, and nothing need be measured
    for (Entry& entry : entries) entry.fail(failure);
    return result;
  }
  const auto tell = [&options](const std::string& text) {
    if (options.progress) options.progress->say(text);
  };
  // What is refused is known before anything is measured; of contestants in other processes it is known once they are there.
  for (Entry& entry : entries)
    if (!entry.contestant->apart()) entry.guarded([&] { entry.contestant->accept(*entry.spec, options.grad, options.memory_limit); });
  if (std::none_of(entries.begin(), entries.end(), [](const Entry& entry) { return entry.running; })) return result;
  const TimeLeft left(options.time_limit, tell);
  const std::optional<GpuSensors> sensors = options.place.device == Device::kCuda ? sensors_of(options.place.index) : std::nullopt;
  // Those in this process first, which need not be started, and before others disturb them.
  Schedule schedule(options);
  for (Entry& entry : entries) entry.grad = options.grad;
  const bool estimated = schedule.worth_it(entries);
  if (estimated) {
    schedule.estimate(entries, false);
    schedule.plan(entries);
    schedule.refuse_if_too_long(entries);
  }
  result.before = peaks_of(*problems.front(), options);
  result.ceilings = ceilings_of(result.before, options);
  for (Entry& entry : entries) entry.contestant->begin();
  for (Entry& entry : entries)
    entry.guarded([&] {
      left.get_ready(*entry.contestant, entries.size() == 1);
      entry.compiles = entry.contestant->compiles();
      const std::string forward_only = options.grad ? entry.contestant->forward_only() : "";
      if (forward_only.empty()) return;
      entry.grad = false;
      for (Row* row : entry.rows)
        if (row->pass != Pass::kForward) row->fail({Status::kUnsupported, forward_only});
    });
  if (estimated) schedule.estimate(entries, true);
  schedule.plan(entries);
  if (estimated) schedule.refuse_if_too_long(entries);
  schedule.announce(entries);
  for (const ProblemSpec* spec : problems) {
    const auto inputs = std::make_shared<const Inputs>(make_inputs(*spec, options.grad));
    for (Entry& entry : entries)
      if (*entry.spec == *spec) entry.inputs = inputs;
  }
  {
    // Standard first: the others are compared with its result. Those that compile do so meanwhile on a GPU, where nothing is timed yet and the memory
    // of each is counted apart; on the CPU, where all is one process's or one machine's, last, so that none waits for them.
    std::vector<Entry*> order;
    order.reserve(entries.size());
    for (Entry& entry : entries) order.push_back(&entry);
    std::stable_partition(order.begin(), order.end(), [](const Entry* entry) { return entry->contestant->identity().provider == "standard"; });
    std::stable_partition(order.begin(), order.end(), [](const Entry* entry) { return !entry->compiles; });
    Standard standard;
    const auto get_ready = [&](Entry& entry, bool all_that_is_left) {
      left.get_ready(*entry.contestant, all_that_is_left);
      if (entry.running && entry.compiles) tell(entry.contestant->identity().provider + " compiles for this problem, which may take a minute");
      entry.guarded([&] {
        check(entry, options, standard);
        schedule.step(entry, entry.steps.check);
      });
      // One at a time, each with a peak of its own.
      entry.guarded([&] {
        for (size_t p = 0; p < entry.rows.size(); ++p) {
          if (!entry.has(p)) continue;
          entry.rows[p]->memory = entry.contestant->memory(entry.rows[p]->pass);
          schedule.step(entry, entry.steps.passes[p].memory);
        }
      });
      entry.guarded([&] { entry.contestant->release(); });
      if (!entry.running) schedule.forget(entry);
    };
    std::vector<std::future<void>> compiling;
    if (options.place.device == Device::kCuda) {
      const auto behind_standard = std::partition_point(
          order.begin(), order.end(), [](const Entry* entry) { return !entry->compiles && entry->contestant->identity().provider == "standard"; });
      for (auto entry = order.begin(); entry != behind_standard; ++entry) get_ready(**entry, false);
      order.erase(order.begin(), behind_standard);
      for (; !order.empty() && order.back()->compiles; order.pop_back())
        compiling.push_back(std::async(std::launch::async, get_ready, std::ref(*order.back()), true));
    }
    for (Entry* entry : order) get_ready(*entry, entry == order.back());
    for (std::future<void>& one : compiling) one.get();
  }
  {
    const MachineWatch watch;
    for (size_t p = 0; p < options.passes.size(); ++p) {
      time_pass(entries, p, options.passes[p], options, sensors ? &*sensors : nullptr, left, schedule);
      if (options.keep) keep_passes(result, p + 1, entrants.size(), options);
    }
    result.disturbance = watch.stop();
  }
  for (Entry& entry : entries)
    entry.guarded([&] {
      left.let_go(*entry.contestant);
      entry.contestant->release();
    });

  result.after = peaks_of(*problems.front(), options);
  const Peaks peaks = higher(result.before, result.after);
  for (Row& row : result.rows) {
    set_rates(row, peaks);
    compare_memory(row);
  }
  lab::rate_rows(result.rows, result.ceilings, peaks);
  for (const std::string& problem : {result.before.problem, result.after.problem})
    if (!problem.empty())
      for (Row& row : result.rows) row.warnings.push_back("the machine's peak is not known in full: " + problem);
  const double drift = result.after.fma.rate / std::max(result.before.fma.rate, 1.0);
  if (result.before.fma.rate > 0 && result.after.fma.rate > 0 && !(drift > 0.9 && drift < 1.1))
    for (Row& row : result.rows)
      row.warnings.push_back(
          fmt::format("the machine's peak changed from {:.0f} to {:.0f} GFLOP/s during the measurement: something else was running or the clock "
                      "changed; shares of the peak are of the higher",
                      result.before.fma.rate / 1e9, result.after.fma.rate / 1e9));
  for (size_t p = 0; p < options.passes.size(); ++p) {
    const auto begin = result.rows.begin() + static_cast<std::ptrdiff_t>(p * entrants.size());
    std::vector<Row> pass(begin, begin + static_cast<std::ptrdiff_t>(entrants.size()));
    set_speedups(pass);
    std::copy(pass.begin(), pass.end(), begin);
  }
  return result;
}

int exit_code_of(const std::vector<Row>& rows) {
  const bool bad =
      std::any_of(rows.begin(), rows.end(), [](const Row& r) { return r.status == Status::kCheckFailed || r.status == Status::kRefused; });
  if (bad) return kExitCheckFailed;
  return std::any_of(rows.begin(), rows.end(), [](const Row& r) { return r.ok(); }) ? kExitFine : kExitBadInput;
}

}  // namespace fattn::cli
