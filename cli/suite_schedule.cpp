#include "cli/suite_schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <stdexcept>
#include <tuple>

#include "cli/schedule.h"
#include "measure/estimate.h"

namespace fattn::cli {

using namespace measure;

namespace {

// What a race takes whatever its problem: peaks before and after, a warm-up of the clock.
constexpr double kSecondsARace = 1;

// Races whose calls take as long for a FLOP.
using Kind = std::tuple<DType, int64_t, bool, bool>;
Kind kind_of(const ProblemSpec& s) { return {s.dtype, s.headdim, s.causal, s.seqlen_q < 16}; }

double flops_of(const ProblemSpec& spec, Pass pass) { return std::max(cost_of(spec, pass).flops, 1.0); }

bool fits(const PlannedRace& race, int64_t memory_limit) {
  try {
    require_memory(race.spec.input_bytes(race.grad), memory_limit, "the input");
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace

void estimate_races(std::vector<PlannedRace>& races, Contestant& library, const RaceOptions& options) {
  std::map<Kind, const PlannedRace*> longest;
  for (const PlannedRace& race : races) {
    if (!fits(race, options.memory_limit)) continue;
    const PlannedRace*& one = longest[kind_of(race.spec)];
    if (!one || flops_of(race.spec, Pass::kForward) > flops_of(one->spec, Pass::kForward)) one = &race;
  }
  struct Rate {
    double forward = 0, backward = 0;  // seconds of a FLOP
  };
  std::map<Kind, Rate> rates;
  for (const auto& [kind, race] : longest) {
    const CallSeconds calls = estimate_calls(library, race->spec, race->grad, options.memory_limit, options.place);
    rates[kind] = {calls.forward / flops_of(race->spec, Pass::kForward), calls.backward / flops_of(race->spec, Pass::kBackward)};
  }
  for (PlannedRace& race : races) {
    const Rate rate = rates[kind_of(race.spec)];
    if (rate.forward <= 0 || !fits(race, options.memory_limit)) continue;  // its rows will say why, in no time
    const CallSeconds calls{rate.forward * flops_of(race.spec, Pass::kForward), race.grad ? rate.backward * flops_of(race.spec, Pass::kBackward) : 0};
    const double oracle = oracle_seconds(race.spec, race.grad, options.oracle_flops);
    const double of_one = seconds_of_steps(calls, race.passes, race.grad, race.sampling, oracle).total(race.sampling);
    race.seconds = kSecondsARace + static_cast<double>(race.contestants) * of_one + input_seconds(race.spec, race.grad);
  }
}

double seconds_of(const std::vector<PlannedRace>& races) {
  double seconds = 0;
  for (const PlannedRace& race : races) seconds += race.seconds;
  return seconds;
}

void refuse_if_too_long(const std::vector<PlannedRace>& races, const std::string& what, double patience) {
  const double seconds = seconds_of(races);
  if (patience <= 0 || !(seconds > patience)) return;
  throw std::runtime_error(
      fmt::format("{} would take about {}; allowed: {}. Choose parts of it with --only, or --quick, or allow it with --patience {}", what,
                  duration_in_words(seconds), duration_in_words(patience), patience_for(seconds)));
}

void announce(const std::vector<PlannedRace>& races, Progress& progress) {
  const double seconds = seconds_of(races);
  progress.expect(seconds, true);
  if (seconds >= kWorthSaying) progress.say("about " + duration_in_words(seconds));
}

}  // namespace fattn::cli
