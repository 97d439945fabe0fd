#include "cli/advise_when.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "cli/json_output.h"
#include "cli/kept.h"
#include "cli/progress.h"
#include "cli/sanitize.h"
#include "cli/table.h"
#include "cli/usage_error.h"
#include "fattn/device.hpp"
#include "lab/call_timer.h"
#include "lab/crossing.h"
#include "measure/environment.h"

namespace fattn::cli {
namespace {

using lab::Crossing;
using lab::Duel;
using measure::Pass;
using measure::ProblemSpec;
using Json = nlohmann::ordered_json;

constexpr int64_t kShortest = 8;
constexpr double kCloser = 1.5;  // lengths that a crossing is found between
constexpr int kRounds = 5;
constexpr double kSecondsOfTurn = 0.03;

// Which of two algorithms, for what.
struct Rule {
  std::string what, a, b;  // b is what may be faster from some length on
  Algorithm algorithm_a, algorithm_b;
  Pass pass;
  bool decode = false;  // one query, and the length is the keys'
};

std::vector<Rule> rules_of(const WhenOptions& o) {
  const Algorithm standard = Algorithm::kStandard, automatic = Algorithm::kAuto;
  std::vector<Rule> rules = {{"inference, forward", "standard", "fattn", standard, automatic, Pass::kForward}};
  rules.push_back({"training, forward and backward", "standard", "fattn", standard, automatic, Pass::kForwardBackward});
  rules.push_back({"decode, one query", "standard", "fattn", standard, automatic, Pass::kForward, true});
  const bool hopper = o.place.device == Device::kCuda && cuda::info(o.place.index).capability_major == 9;
  if (hopper) {
    rules.push_back({"forward, v3 against v2", "v2", "v3", Algorithm::kV2, Algorithm::kV3, Pass::kForward});
    rules.push_back({"both passes, v3 against v2", "v2", "v3", Algorithm::kV2, Algorithm::kV3, Pass::kForwardBackward});
  }
  return rules;
}

ProblemSpec spec_at(const WhenOptions& o, const Rule& rule, int64_t seqlen) {
  ProblemSpec s = o.problem;
  s.seqlen_k = seqlen;
  s.seqlen_q = rule.decode ? 1 : seqlen;
  return s;
}

// Both in turns, so that what disturbs one disturbs the other.
Duel duel_at(const WhenOptions& o, const Rule& rule, int64_t seqlen) {
  Duel duel;
  duel.seqlen = seqlen;
  const ProblemSpec spec = spec_at(o, rule, seqlen);
  const bool grad = rule.pass != Pass::kForward;
  std::optional<lab::CallTimer> timers[2];
  std::vector<double> seconds[2];
  const Algorithm algorithms[2] = {rule.algorithm_a, rule.algorithm_b};
  lab::TimingOptions timing;
  timing.seconds = kSecondsOfTurn;
  for (int round = 0; round < kRounds; ++round)
    for (int i = 0; i < 2; ++i) {
      if (round > 0 && !timers[i]) continue;
      try {
        if (!timers[i]) {
          Options library;
          library.algorithm = algorithms[i];
          timers[i].emplace(library, o.place);
          timers[i]->prepare(spec, grad);
          if (grad) timers[i]->time(Pass::kForward, timing);
        }
        for (const double s : timers[i]->time(rule.pass, timing)) seconds[i].push_back(s);
      } catch (const std::exception& error) {
        timers[i].reset();
        seconds[i].clear();
        duel.reason += fmt::format("{}{}: {}", duel.reason.empty() ? "" : "; ", i == 0 ? rule.a : rule.b, error.what());
      }
    }
  if (!seconds[0].empty()) duel.a = measure::summarize(seconds[0]);
  if (!seconds[1].empty()) duel.b = measure::summarize(seconds[1]);
  return duel;
}

// How much faster b is where it is.
std::string at_length(const Crossing& c, int64_t seqlen) {
  for (const Duel& d : c.duels)
    if (d.seqlen == seqlen && d.a && d.b) return fmt::format("{:.2f} times as fast at {}", d.a->median / d.b->median, seqlen);
  return {};
}

std::string conclusion(const Rule& rule, const Crossing& c) {
  const char* const what = rule.decode ? "keys" : "tokens";
  const std::string at_end = at_length(c, c.duels.back().seqlen);
  const std::string behind = at_end.empty() ? "" : ": " + at_end;
  bool timed = false;
  for (const Duel& d : c.duels) timed = timed || (d.a && d.b);
  if (!timed) return fmt::format("{}: they cannot be compared here, {}", rule.what, printable(c.duels.back().reason, 300));
  if (c.always)
    return fmt::format("{}: {}, from the shortest that was measured, {} {}, to the longest{}", rule.what, rule.b, c.duels.front().seqlen, what,
                       behind);
  if (c.never) {
    bool slower = false;
    for (const Duel& d : c.duels) slower = slower || d.verdict() < 0;
    return fmt::format("{}: up to {} {} {} is not measurably faster than {}{}{}", rule.what, c.duels.back().seqlen, what, rule.b, rule.a,
                       slower ? ", and slower at some" : "", behind);
  }
  return fmt::format("{}: {} from {} {} on{}; up to {} it is {} or undecided", rule.what, rule.b, c.faster_from, what, behind, c.slower_until,
                     rule.a);
}

Cell time_cell(const std::optional<measure::Statistics>& time) { return time ? seconds_cell(time->median) : Cell("-", ""); }

void print_rule(Output& out, const Rule& rule, const Crossing& c) {
  Table table({Column::number(rule.decode ? "keys" : "seqlen").as_key(), Column::number(rule.a, "s"), Column::number(rule.b, "s"),
               Column::number("speed-up"), Column::text("faster")},
              rule.what);
  for (const Duel& d : c.duels) {
    const int verdict = d.verdict();
    table.add({count_cell(d.seqlen), time_cell(d.a), time_cell(d.b), d.a && d.b ? times_cell(d.a->median / d.b->median, verdict == 0) : Cell(),
               verdict < 0   ? Cell(rule.a)
               : verdict > 0 ? Cell(rule.b).in(Mood::kGood)
                             : Cell("undecided").in(Mood::kUnsure)});
    if (!d.reason.empty()) table.note(printable(d.reason, 300));
  }
  out.print(table);
}

// `complete`: the search came to its end; else its lengths say nothing of others.
Json to_json(const Rule& rule, const Crossing& c, bool complete = true) {
  Json duels = Json::array();
  const auto time = [](const std::optional<measure::Statistics>& t) {
    return t ? Json{{"median_s", t->median}, {"ci_low_s", t->ci_low}, {"ci_high_s", t->ci_high}, {"samples", t->samples}} : Json(nullptr);
  };
  for (const Duel& d : c.duels)
    duels.push_back({{"seqlen", d.seqlen},
                     {"a", time(d.a)},
                     {"b", time(d.b)},
                     {"faster", d.verdict() < 0   ? Json(rule.a)
                                : d.verdict() > 0 ? Json(rule.b)
                                                  : Json(nullptr)},
                     {"reason", d.reason.empty() ? Json(nullptr) : Json(d.reason)}});
  return {{"what", rule.what},
          {"a", rule.a},
          {"b", rule.b},
          {"pass", measure::name_of(rule.pass)},
          {"decode", rule.decode},
          {"not_faster_until", c.slower_until > 0 ? Json(c.slower_until) : Json(nullptr)},
          {"faster_from", c.faster_from > 0 ? Json(c.faster_from) : Json(nullptr)},
          {"conclusion", complete ? conclusion(rule, c) : rule.what + ": not searched to the end, so nothing is said of it"},
          {"duels", duels}};
}

Json record_of(const WhenOptions& o, const Json& environment, const Json& rules, bool complete) {
  return {{"fattn_advice", 1}, {"what", "when"}, {"flags", o.flags}, {"complete", complete}, {"environment", environment}, {"rules", rules}};
}

}  // namespace

int advise_when(const WhenOptions& o, Output& out) {
  const std::vector<Rule> rules = rules_of(o);
  std::vector<Crossing> crossings;
  Json found = Json::array();
  const Json environment = measure::environment();
  {
    // Both ends and what lies between, each time half of it.
    int steps = 2;
    for (double ratio = static_cast<double>(o.longest) / kShortest; ratio > kCloser; ratio = std::sqrt(ratio)) ++steps;
    Kept kept(o.json);
    Progress progress("when to use which", static_cast<int64_t>(rules.size()) * steps);
    for (const Rule& rule : rules) {
      Crossing so_far;
      crossings.push_back(lab::find_crossing(kShortest, o.longest, kCloser, [&](int64_t seqlen) {
        Duel duel = duel_at(o, rule, seqlen);
        progress.step();
        so_far.duels.push_back(duel);
        std::sort(so_far.duels.begin(), so_far.duels.end(), [](const Duel& x, const Duel& y) { return x.seqlen < y.seqlen; });
        Json rules_so_far = found;
        rules_so_far.push_back(to_json(rule, so_far, false));
        kept.keep([record = record_of(o, environment, rules_so_far, false)] { return record; },
                  fmt::format("{} of {} rules and {} length{} of the next", found.size(), rules.size(), so_far.duels.size(),
                              so_far.duels.size() == 1 ? "" : "s"));
        return duel;
      }));
      found.push_back(to_json(rule, crossings.back()));
      if (const int done = static_cast<int>(so_far.duels.size()); done < steps) progress.drop(steps - done);
    }
  }
  const ProblemSpec& spec = o.problem;
  out.say(fmt::format("Batch {}, {} heads of {}, {}{}, on {}; measured now, in turns.", spec.batch, spec.nheads, spec.headdim, name_of(spec.dtype),
                      spec.causal ? ", causal" : "", o.place.name()));
  out.say("");
  for (size_t i = 0; i < rules.size(); ++i) out.say_line("- " + conclusion(rules[i], crossings[i]) + ".", 2);
  for (size_t i = 0; i < rules.size(); ++i) print_rule(out, rules[i], crossings[i]);
  out.say(
      "\nundecided: the 95 % intervals of both medians overlap. Memory decides, too: standard attention stores seqlen_q * seqlen_k numbers a head.");
  if (!o.json.empty()) write_json(record_of(o, environment, found, true), o.json);
  return kExitFine;
}

}  // namespace fattn::cli
