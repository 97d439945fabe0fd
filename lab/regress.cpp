// Which rows belong together, and the verdict of each.
#include "lab/regress.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>

namespace fattn::lab {
namespace {

// A row's memory is exact where the library says what it allocated; of less than this more nobody speaks.
constexpr double kSmallMemory = 65536;
// Clocks that differ by more than this are another measurement.
constexpr double kSameClock = 0.03;

std::string label_in(const RowOfRecord& row, const RegressOptions& options, bool baseline) {
  for (const auto& [was, is] : options.match)
    if ((baseline ? was : is) == row.label) return is;
  return row.label;
}

// With names of contestants that are to be compared the others are not asked about.
bool asked_about(const RowOfRecord& row, const RegressOptions& options, bool baseline) {
  const auto named = [&](const auto& names) { return (baseline ? names.first : names.second) == row.label; };
  return options.match.empty() || std::any_of(options.match.begin(), options.match.end(), named);
}

std::string key_of(const RowOfRecord& row, const std::string& label) {
  return row.problem() + "\n" + row.pass + "\n" + label + "\n" + row.device.substr(0, row.device.find(':'));
}

std::string other_clocks(const RowOfRecord& was, const RowOfRecord& is, const RegressOptions& options) {
  if (options.across_clocks || !was.sm_clock_mhz || !is.sm_clock_mhz || !(*was.sm_clock_mhz > 0)) return "";
  const double ratio = *is.sm_clock_mhz / *was.sm_clock_mhz;
  return std::abs(ratio - 1) <= kSameClock ? "" : fmt::format("the clock was {:.0f} MHz and is {:.0f}", *was.sm_clock_mhz, *is.sm_clock_mhz);
}

// Of rows that both have a time.
void judge(RowVerdict& row, bool same_run, const RegressOptions& options) {
  const RowOfRecord &was = *row.baseline, &is = *row.current;
  row.time = change_of(*was.time, *is.time, same_run, options.level);
  if (const std::string clocks = other_clocks(was, is, options); !clocks.empty()) {
    row.verdict = Verdict::kUndecided;
    row.reason = clocks;
  } else if (row.time.interval) {
    row.verdict = verdict_of(*row.time.interval, options.margin);
  } else {
    row.verdict = Verdict::kUndecided;
    row.reason = row.time.reason;
  }
  // Other contestants (match) may need other memory: that is no change of one.
  if (options.match.empty() && was.extra_bytes && is.extra_bytes && was.extra_bytes_method == "allocated" && is.extra_bytes_method == "allocated") {
    const double more = *is.extra_bytes - *was.extra_bytes;
    if (more > std::max(options.margin * *was.extra_bytes, kSmallMemory)) {
      row.reason = fmt::format("{}needs {:.1f} MiB more memory: {:.1f} instead of {:.1f}", row.verdict == Verdict::kBetter ? "faster, but " : "",
                               more / 1048576, *is.extra_bytes / 1048576, *was.extra_bytes / 1048576);
      row.verdict = Verdict::kWorse;
    }
  }
}

void judge_without_times(RowVerdict& row) {
  const RowOfRecord &was = *row.baseline, &is = *row.current;
  const auto why = [](const RowOfRecord& r) { return r.reason.empty() ? r.status : r.status + ": " + r.reason; };
  if (was.ok() && is.status == "unavailable") {
    row.verdict = Verdict::kVanished;
    row.reason = why(is);
  } else if (was.ok()) {
    row.verdict = Verdict::kWorse;
    row.reason = "was ok, now " + why(is);
  } else if (is.ok()) {
    row.verdict = was.status == "unavailable" ? Verdict::kAppeared : Verdict::kBetter;
    row.reason = "is ok, was " + why(was);
  } else {
    row.verdict = Verdict::kFailed;
    row.reason = "both times: " + why(is);
  }
}

}  // namespace

const char* name_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::kWorse: return "worse";
    case Verdict::kUndecided: return "undecided";
    case Verdict::kBetter: return "better";
    case Verdict::kSame: return "same";
    case Verdict::kFailed: return "failed";
    case Verdict::kVanished: return "vanished";
    case Verdict::kAppeared: return "appeared";
  }
  return "";
}

Verdict verdict_of(const RatioInterval& interval, double margin) {
  const double most = 1 + margin, least = 1 / most;
  if (interval.low > most) return Verdict::kWorse;
  if (interval.high < least) return Verdict::kBetter;
  if (interval.low >= least && interval.high <= most) return Verdict::kSame;
  return Verdict::kUndecided;
}

TimeChange change_of(const TimeOfRow& baseline, const TimeOfRow& current, bool same_run, double level) {
  TimeChange change;
  const bool samples = !baseline.turns.empty() && !current.turns.empty();
  if (samples && same_run && baseline.turns.size() == current.turns.size()) {
    std::vector<Stratum> turns;
    for (size_t i = 0; i < baseline.turns.size(); ++i) turns.push_back({baseline.turns[i], current.turns[i]});
    change.interval = ratio_interval(std::move(turns), level);
    change.paired = true;
    if (change.interval) return change;
    change.paired = false;
  }
  if (samples && !turns_differ({baseline.turns, current.turns})) {
    Stratum all;
    for (const std::vector<double>& turn : baseline.turns) all.baseline.insert(all.baseline.end(), turn.begin(), turn.end());
    for (const std::vector<double>& turn : current.turns) all.current.insert(all.current.end(), turn.begin(), turn.end());
    change.interval = ratio_interval({all}, level);
    if (!change.interval)
      change.reason = fmt::format("{} and {} samples are too few for an interval of {:.0f} %", all.baseline.size(), all.current.size(), 100 * level);
    return change;
  }
  const auto medians = [](const TimeOfRow& time) {
    std::vector<double> all = time.turn_medians;
    if (all.empty())
      for (const std::vector<double>& turn : time.turns) all.push_back(median_of(turn));
    return all;
  };
  const Stratum turns{medians(baseline), medians(current)};
  change.by_turns = true;
  change.interval = ratio_interval({turns}, level);
  if (change.interval) return change;
  if (turns.baseline.empty() || turns.current.empty())
    change.reason = fmt::format("the {} has neither samples nor medians of turns", turns.baseline.empty() ? "baseline" : "current record");
  else
    change.reason = fmt::format("{} and {} turns are too few for an interval of {:.0f} %", turns.baseline.size(), turns.current.size(), 100 * level);
  return change;
}

std::vector<RowVerdict> regress(const MeasuredRecord& baseline, const MeasuredRecord& current, const RegressOptions& options) {
  // Rows of one key (plain attention beside each of several options) go together in their order.
  std::map<std::string, std::vector<const RowOfRecord*>> unmatched;
  for (const RowOfRecord& row : baseline.rows)
    if (asked_about(row, options, true)) unmatched[key_of(row, label_in(row, options, true))].push_back(&row);
  for (auto& [key, rows] : unmatched) std::reverse(rows.begin(), rows.end());
  const bool same_run = baseline.environment == current.environment && baseline.peaks == current.peaks;
  std::vector<RowVerdict> verdicts;
  bool any = false;
  for (const RowOfRecord& row : current.rows) {
    RowVerdict verdict;
    verdict.current = &row;
    if (!asked_about(row, options, false)) continue;
    const auto at = unmatched.find(key_of(row, label_in(row, options, false)));
    if (at == unmatched.end() || at->second.empty()) {
      verdict.verdict = Verdict::kAppeared;
      verdict.reason = "the baseline has no such row";
    } else {
      any = true;
      verdict.baseline = at->second.back();
      at->second.pop_back();
      if (verdict.baseline->ok() && row.ok())
        judge(verdict, same_run, options);
      else
        judge_without_times(verdict);
    }
    verdicts.push_back(verdict);
  }
  if (!any) throw RecordError("no row of '" + current.file + "' is in '" + baseline.file + "': they hold other problems, passes or contestants");
  for (const RowOfRecord& row : baseline.rows) {
    const std::vector<const RowOfRecord*>& left = unmatched[key_of(row, label_in(row, options, true))];
    if (!asked_about(row, options, true) || std::find(left.begin(), left.end(), &row) == left.end()) continue;
    RowVerdict verdict;
    verdict.baseline = &row;
    verdict.verdict = Verdict::kVanished;
    verdict.reason = current.complete ? "the current record has no such row" : "the current record was interrupted before it";
    verdicts.push_back(verdict);
  }
  return verdicts;
}

namespace {

Json head_of(const MeasuredRecord& record) {
  const JsonPart environment(record.environment, "environment");
  return {{"file", record.file},
          {"command", record.command},
          {"flags", record.flags},
          {"complete", record.complete},
          {"date", environment.has("date") ? Json(environment.text("date")) : Json(nullptr)},
          {"library_version", environment.has("library_version") ? Json(environment.text("library_version")) : Json(nullptr)},
          {"commit", environment.has("commit") ? Json(environment.text("commit")) : Json(nullptr)}};
}

}  // namespace

Json to_json(const std::vector<RowVerdict>& rows, const MeasuredRecord& baseline, const MeasuredRecord& current, const RegressOptions& options) {
  Json counts = Json::object(), list = Json::array();
  for (const Verdict v :
       {Verdict::kWorse, Verdict::kBetter, Verdict::kSame, Verdict::kUndecided, Verdict::kFailed, Verdict::kVanished, Verdict::kAppeared})
    counts[name_of(v)] = std::count_if(rows.begin(), rows.end(), [v](const RowVerdict& row) { return row.verdict == v; });
  for (const RowVerdict& row : rows) {
    const auto time = [](const RowOfRecord* r) { return r && r->ok() ? Json(r->time->median) : Json(nullptr); };
    const auto memory = [](const RowOfRecord* r) { return r && r->extra_bytes ? Json(*r->extra_bytes) : Json(nullptr); };
    const std::optional<RatioInterval>& interval = row.time.interval;
    list.push_back({{"problem", row.row().problem()},
                    {"pass", row.row().pass},
                    {"provider", row.row().label},
                    {"device", row.row().device},
                    {"verdict", name_of(row.verdict)},
                    {"reason", row.reason.empty() ? Json(nullptr) : Json(row.reason)},
                    {"baseline_s", time(row.baseline)},
                    {"current_s", time(row.current)},
                    {"ratio", interval ? Json(interval->ratio) : Json(nullptr)},
                    {"ratio_low", interval ? Json(interval->low) : Json(nullptr)},
                    {"ratio_high", interval ? Json(interval->high) : Json(nullptr)},
                    {"paired", row.time.paired},
                    {"by_turns", row.time.by_turns},
                    {"baseline_extra_bytes", memory(row.baseline)},
                    {"current_extra_bytes", memory(row.current)}});
  }
  return {{"fattn_regress", kRegressVersion},
          {"verdict", counts["worse"] > 0 ? "worse" : "fine"},
          {"margin_fraction", options.margin},
          {"level", options.level},
          {"baseline", head_of(baseline)},
          {"current", head_of(current)},
          {"differences", obstacles(baseline, current, RegressOptions{})},
          {"counts", counts},
          {"rows", list}};
}

}  // namespace fattn::lab
