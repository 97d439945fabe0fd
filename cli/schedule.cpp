#include "cli/schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>

namespace fattn::cli {

using namespace measure;

namespace {

constexpr double kFewestCalls = kFewestSamples + 3;  // of a pass: warm-up, samples, memory, check
constexpr double kInputsPerSecond = 5e7, kCompileSeconds = 30;

}  // namespace

bool Schedule::worth_it(const std::vector<Entry>& entries) const {
  if (options_.part_of_suite) return false;
  double flops = 0;
  for (const Entry& entry : entries)
    for (const Row* row : entry.rows) flops += kFewestCalls * row->cost.flops;
  return flops >= flops_worth_an_estimate(options_.place);
}

void Schedule::estimate(std::vector<Entry>& entries, bool apart) {
  for (Entry& entry : entries)
    if (entry.running && entry.contestant->apart() == apart) {
      const CallSeconds first = calls_.empty() ? CallSeconds() : calls_.front().second;
      // What compiles takes longer to do so for a slice than it tells: it is taken to be as fast as the first contestant.
      if (entry.compiles)
        calls_.push_back({&entry, first});
      else
        calls_.push_back({&entry, estimate_calls(*entry.contestant, *entry.spec, entry.grad, options_.memory_limit, options_.place,
                                                 apart ? telling_flops(first, *entry.spec) : 0)});
    }
}

void Schedule::plan(std::vector<Entry>& entries) {
  for (Entry& entry : entries) {
    if (!entry.running) continue;
    CallSeconds calls;
    for (const auto& [estimated, seconds] : calls_)
      if (estimated == &entry) calls = seconds;
    entry.steps =
        seconds_of_steps(calls, options_.passes, entry.grad, options_.sampling, oracle_seconds(*entry.spec, entry.grad, options_.oracle_flops));
    if (entry.compiles) entry.steps.check += kCompileSeconds;
    for (size_t p = 0; p < options_.passes.size(); ++p)
      if (!entry.has(p)) entry.steps.passes[p] = {};
    entry.expected = entry.steps.total(options_.sampling);
  }
}

double Schedule::total(const std::vector<Entry>& entries) const {
  double inputs = 0, seconds = 0;
  for (const Entry& entry : entries) {
    seconds += entry.expected;
    inputs = std::max(inputs, input_seconds(*entry.spec, options_.grad));
  }
  seconds += inputs;
  return options_.time_limit > 0 ? std::min(seconds, options_.time_limit) : seconds;
}

void Schedule::refuse_if_too_long(const std::vector<Entry>& entries) const {
  const double seconds = total(entries);
  if (options_.patience <= 0 || !(seconds > options_.patience)) return;
  const ProblemSpec& s = *entries.front().spec;
  std::string smaller;
  constexpr double kComfortable = 60;
  const double length = static_cast<double>(s.seqlen_q) * std::sqrt(kComfortable / seconds);
  if (s.seqlen_q == s.seqlen_k && !s.has_terms() && !s.windowed() && length >= 1024)
    smaller = fmt::format(" (--seqlen {} takes about a minute)", static_cast<int64_t>(length) / 1024 * 1024);
  throw std::runtime_error(fmt::format("{} would take about {}; allowed: {}. Choose a smaller problem{}{}, or allow it with --patience {}",
                                       describe(s), duration_in_words(seconds), duration_in_words(options_.patience), smaller,
                                       entries.size() > 1 ? " or fewer contestants" : "", patience_for(seconds)));
}

std::string patience_for(double seconds) {
  const double hours = std::ceil(1.5 * seconds / 3600);
  return hours < 48 ? fmt::format("{:.0f}h", hours) : fmt::format("{:.0f}d", std::ceil(hours / 24));
}

void Schedule::announce(const std::vector<Entry>& entries) const {
  const double seconds = total(entries);
  if (!options_.progress || options_.part_of_suite) return;
  options_.progress->expect(seconds, true);
  if (seconds >= kWorthSaying) options_.progress->say("about " + duration_in_words(seconds));
}

void Schedule::step(Entry& entry, double seconds) const {
  entry.expected -= seconds;
  if (options_.progress && !options_.part_of_suite) options_.progress->step(seconds);
}
void Schedule::forget(Entry& entry) const {
  if (options_.progress && !options_.part_of_suite) options_.progress->drop(entry.expected);
  entry.expected = 0;
}

double input_seconds(const ProblemSpec& spec, bool grad) {
  return static_cast<double>(spec.input_bytes(grad)) / static_cast<double>(size_of(spec.dtype)) / kInputsPerSecond;
}

double oracle_seconds(const ProblemSpec& s, bool grad, double oracle_flops) {
  constexpr double kForwardFlopsPerSecond = 2e9, kBackwardFlopsPerSecond = 6e8, kNumbersPerSecond = 8e7;
  return oracle_flops / (grad ? kBackwardFlopsPerSecond : kForwardFlopsPerSecond) +
         3 * static_cast<double>(s.seqlen_k) * static_cast<double>(s.headdim + s.headdim_v) / kNumbersPerSecond;
}

}  // namespace fattn::cli
