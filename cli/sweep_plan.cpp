#include "cli/sweep_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "cli/contestants.h"
#include "cli/schedule.h"
#include "fattn/problem.hpp"
#include "measure/estimate.h"

namespace fattn::cli {
namespace {

using namespace measure;

constexpr double kSecondsAStep = 1;  // peaks before and after, a warm-up of the clock

// Steps whose calls take as long for a FLOP.
using StepKind = std::tuple<int64_t, bool, bool, int>;
StepKind kind_of_step(const lab::Step& step) { return {step.spec.headdim, step.spec.causal, step.spec.seqlen_q < 16, step.threads}; }

double flops_of_step(const ProblemSpec& spec, Pass pass) { return std::max(cost_of(spec, pass).flops, 1.0); }

bool accepts(Contestant& contestant, const ProblemSpec& spec, const RaceOptions& options) {
  try {
    require_memory(spec.input_bytes(options.grad), options.memory_limit, "the input");
    contestant.accept(spec, options.grad, options.memory_limit);
    return true;
  } catch (const std::exception&) {  // its row will say why
    return false;
  }
}

// Of one contestant at all steps.
void estimate_contestant(std::vector<PlannedStep>& steps, size_t index, SweepContestants& contestants, const RaceOptions& options) {
  std::vector<PlannedStep*> longest_first;
  for (PlannedStep& step : steps)
    if (!step.impossible && step.entries[index].wanted) longest_first.push_back(&step);
  std::stable_sort(longest_first.begin(), longest_first.end(), [](const PlannedStep* a, const PlannedStep* b) {
    return flops_of_step(a->step.spec, Pass::kForward) > flops_of_step(b->step.spec, Pass::kForward);
  });
  struct Rate {
    double forward = 0, backward = 0;  // seconds of a FLOP
  };
  std::map<StepKind, Rate> rates;
  for (PlannedStep* planned : longest_first) {
    const ProblemSpec& spec = planned->step.spec;
    Contestant& contestant = *contestants.with_threads(planned->step.threads)[index];
    if (contestant.apart() || !accepts(contestant, spec, options)) continue;
    const auto known = rates.find(kind_of_step(planned->step));
    Rate rate;
    if (known == rates.end()) {
      const CallSeconds calls = estimate_calls(contestant, spec, options.grad, options.memory_limit, options.place);
      rate = {calls.forward / flops_of_step(spec, Pass::kForward), calls.backward / flops_of_step(spec, Pass::kBackward)};
      rates[kind_of_step(planned->step)] = rate;
    } else {
      rate = known->second;
    }
    if (rate.forward <= 0) continue;
    const CallSeconds calls{rate.forward * flops_of_step(spec, Pass::kForward),
                            options.grad ? rate.backward * flops_of_step(spec, Pass::kBackward) : 0};
    const double oracle = oracle_seconds(spec, options.grad, options.oracle_flops);
    planned->entries[index].seconds = seconds_of_steps(calls, options.passes, options.grad, options.sampling, oracle).total(options.sampling);
  }
}

}  // namespace

double PlannedStep::seconds() const {
  double seconds = 0;
  for (const Entry& entry : entries)
    if (entry.measured()) seconds += entry.seconds;
  return seconds > 0 ? seconds + kSecondsAStep : 0;
}

bool PlannedStep::anything() const {
  return std::any_of(entries.begin(), entries.end(), [](const Entry& entry) { return entry.wanted; });
}

SweepContestants::SweepContestants(std::vector<std::string> names, Options options, Placement place, const ProviderFlags& providers)
    : names_(std::move(names)), options_(std::move(options)), place_(place), providers_(providers) {}

Options SweepContestants::options(int threads) const {
  Options options = options_;
  if (threads > 0) options.num_threads = threads;
  return options;
}

std::vector<Contestant*> SweepContestants::with_threads(int threads) {
  auto set = std::find_if(sets_.begin(), sets_.end(), [&](const Set& one) { return one.threads == threads; });
  if (set == sets_.end()) {
    Set made{threads, {}};
    for (const std::string& name : names_) made.contestants.push_back(make_contestant(name, options(threads), place_, providers_));
    sets_.push_back(std::move(made));
    set = sets_.end() - 1;
  }
  std::vector<Contestant*> all;
  for (const auto& one : set->contestants) all.push_back(one.get());
  return all;
}

void estimate_steps(std::vector<PlannedStep>& steps, SweepContestants& contestants, const RaceOptions& options) {
  constexpr double kFewestCallsAPass = kFewestSamples + 3;
  double flops = 0;
  for (const PlannedStep& step : steps)
    if (!step.impossible)
      for (const Pass pass : options.passes)
        flops += kFewestCallsAPass * static_cast<double>(step.entries.size()) * flops_of_step(step.step.spec, pass);
  if (flops < flops_worth_an_estimate(options.place)) return;
  for (size_t c = 0; c < contestants.names().size(); ++c) estimate_contestant(steps, c, contestants, options);
  for (PlannedStep& step : steps) {
    if (step.impossible) continue;
    double slowest = 0;
    for (const PlannedStep::Entry& entry : step.entries) slowest = std::max(slowest, entry.seconds);
    const std::vector<Contestant*> all = contestants.with_threads(step.step.threads);
    for (size_t c = 0; c < all.size(); ++c)
      if (all[c]->apart() && step.entries[c].wanted) step.entries[c].seconds = slowest;
  }
}

void heed_patience(std::vector<PlannedStep>& steps, double patience) {
  if (patience <= 0) return;
  double left = patience;
  for (PlannedStep& step : steps)
    for (PlannedStep::Entry& entry : step.entries) {
      if (!entry.wanted || entry.seconds <= 0) continue;
      if (entry.seconds <= left) {
        left -= entry.seconds;
        continue;
      }
      entry.too_long =
          fmt::format("would take about {}, and the sweep has {} left of {}. Allow it with --patience {}", duration_in_words(entry.seconds),
                      left < 1 ? "nothing" : duration_in_words(left), duration_in_words(patience), patience_for(patience + entry.seconds - left));
    }
}

}  // namespace fattn::cli
