// Rates with their refusals, comparisons between rows, and JSON.
#include "measure/record.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "measure/environment.h"

namespace fattn::measure {
namespace {

using nlohmann::ordered_json;

template <typename T>
ordered_json or_null(const std::optional<T>& value) {
  return value ? ordered_json(*value) : ordered_json(nullptr);
}
// JSON has no infinity.
ordered_json number(double value) { return std::isfinite(value) ? ordered_json(value) : ordered_json(nullptr); }

std::string text(const char* format, double a, double b) {
  char buffer[256];
  std::snprintf(buffer, sizeof buffer, format, a, b);
  return buffer;
}

template <typename Key, typename Tie>
Winner winner(const std::vector<Row>& rows, const Key& key, const Tie& tie) {
  Winner result;
  for (size_t i = 0; i < rows.size(); ++i)
    if (key(rows[i]) && (result.index < 0 || *key(rows[i]) < *key(rows[static_cast<size_t>(result.index)]))) result.index = static_cast<int>(i);
  for (size_t i = 0; result.index >= 0 && i < rows.size(); ++i)
    if (static_cast<int>(i) != result.index && key(rows[i]) && tie(rows[i], rows[static_cast<size_t>(result.index)]))
      result.undecided_with.push_back(static_cast<int>(i));
  return result;
}

}  // namespace

void Row::fail(const Failure& failure) {
  status = failure.status();
  reason = failure.what();
  absent = failure.absent();
  time.reset();
  memory.reset();
  flops_per_s.reset();
  flops_nominal_per_s.reset();
  peak_fraction.reset();
  peak_name.clear();
  bandwidth_fraction.reset();
  ceiling.reset();
  gpu = {};
  speedup_over_standard.reset();
}

void set_rates(Row& row, const Peaks& peaks) {
  if (!row.ok() || !row.time) return;
  const double seconds = row.time->median, resolution = clock_resolution_seconds();
  const double rate = row.cost.flops / seconds, ceiling = peaks.ceiling(row.spec.dtype);
  if (ceiling > 0 && !(rate <= 1.05 * ceiling)) {
    row.fail({Status::kRefused, text("%.4g GFLOP/s for this shape in the time measured, but the machine's peak is ", rate / 1e9, 0) +
                                    text("%.4g GFLOP/s: the time cannot be that of the whole computation", ceiling / 1e9, 0)});
    return;
  }
  if (!(seconds * kMostCallsASample >= 10 * resolution)) {
    row.fail({Status::kRefused, text("the clock steps by %.3g s; that %.3g s a call cannot be measured with it", resolution, seconds)});
    return;
  }
  row.flops_per_s = rate;
  row.flops_nominal_per_s = row.cost.flops_nominal / seconds;
  const Peak& peak = peaks.of(row.spec.dtype);
  if (peak.rate > 0) {
    row.peak_fraction = rate / peak.rate;
    row.peak_name = peak.name;
    row.peak_flops_per_s = peak.rate;
  }
  if (peaks.read_bytes_per_s > 0) row.bandwidth_fraction = row.cost.bytes / seconds / peaks.read_bytes_per_s;
}

void compare_memory(Row& row) {
  if (!row.memory || !row.memory->rss_measured) return;
  // Stacks, page tables and the allocator's rounding: a mebibyte, or a twentieth of large amounts.
  const double allowed = 1.05 * static_cast<double>(row.memory->extra_bytes) + 1024.0 * 1024.0;
  if (!(static_cast<double>(row.memory->rss_extra_bytes) <= allowed))
    row.warnings.push_back("the resident set grew by " + mebibytes(static_cast<double>(row.memory->rss_extra_bytes)) + ", but only " +
                           mebibytes(static_cast<double>(row.memory->extra_bytes)) + " are accounted for");
}

void set_speedups(std::vector<Row>& rows) {
  const auto standard = std::find_if(rows.begin(), rows.end(), [](const Row& row) { return row.who.provider == "standard" && row.ok() && row.time; });
  for (Row& row : rows) {
    row.speedup_over_standard.reset();
    if (standard != rows.end() && row.ok() && row.time) row.speedup_over_standard = standard->time->median / row.time->median;
  }
}

Winner fastest(const std::vector<Row>& rows) {
  return winner(
      rows, [](const Row& row) { return row.ok() && row.time ? std::optional<double>(row.time->median) : std::nullopt; },
      [](const Row& row, const Row& best) { return undecided(*row.time, *best.time); });
}

Winner leanest(const std::vector<Row>& rows) {
  return winner(
      rows,
      [](const Row& row) { return row.ok() && row.memory ? std::optional<double>(static_cast<double>(row.memory->extra_bytes)) : std::nullopt; },
      [](const Row& row, const Row& best) {
        const double least = static_cast<double>(best.memory->extra_bytes);
        return static_cast<double>(row.memory->extra_bytes) <= least + std::max(0.01 * least, 65536.0);
      });
}

static ordered_json to_json(const CeilingShare& c) {
  return {{"least_s", c.seconds},
          {"limit", c.limit},
          {"fraction", c.fraction},
          {"accounted_fraction", c.accounted},
          {"reach_fraction", or_null(c.reach)},
          {"rating", c.rating.empty() ? ordered_json(nullptr) : ordered_json(c.rating)},
          {"rates", c.whole ? "calibration" : "run"}};
}

ordered_json to_json(const Row& row) {
  ordered_json json = to_json(row.spec);
  json["pass"] = name_of(row.pass);
  json["provider"] = row.who.provider;
  json["backend"] = row.who.backend;
  json["algorithm"] = row.who.algorithm;
  json["device"] = row.who.device;
  json["version"] = row.who.version;
  json["kernel"] = row.who.kernel(row.pass);
  json["isa"] = row.who.isa == Isa::kAuto ? ordered_json(nullptr) : ordered_json(name_of(row.who.isa));
  json["threads"] = row.who.threads;
  json["status"] = name_of(row.status);
  json["reason"] = row.ok() ? ordered_json(nullptr) : ordered_json(row.reason);
  if (row.time) {
    const Statistics& t = *row.time;
    json["samples"] = t.samples;
    json["time_min_s"] = t.min;
    json["time_median_s"] = t.median;
    json["time_mean_s"] = t.mean;
    json["time_max_s"] = t.max;
    json["time_stddev_s"] = t.stddev;
    json["time_ci_low_s"] = t.ci_low;
    json["time_ci_high_s"] = t.ci_high;
    json["time_ci_level"] = t.ci_level;
    json["time_spread_fraction"] = t.spread();
    json["time_turn_medians_s"] = t.turn_medians;
    if (!t.turn_samples.empty()) json["time_turn_samples_s"] = t.turn_samples;
  }
  json["flops"] = row.cost.flops;
  json["flops_nominal"] = row.cost.flops_nominal;
  json["bytes"] = row.cost.bytes;
  json["flops_per_s"] = or_null(row.flops_per_s);
  json["flops_nominal_per_s"] = or_null(row.flops_nominal_per_s);
  json["peak"] = row.peak_name.empty() ? ordered_json(nullptr) : ordered_json(row.peak_name);
  json["peak_flops_per_s"] = row.peak_name.empty() ? ordered_json(nullptr) : ordered_json(row.peak_flops_per_s);
  json["peak_fraction"] = or_null(row.peak_fraction);
  json["bandwidth_fraction"] = or_null(row.bandwidth_fraction);
  json["ceiling"] = row.ceiling ? to_json(*row.ceiling) : ordered_json(nullptr);
  json["sm_clock_mhz"] = or_null(row.gpu.sm_clock_mhz);
  json["power_w"] = or_null(row.gpu.power_w);
  json["held_back_by"] = ordered_json::array();
  for (const HeldBack& one : kHeldBack)
    if ((row.gpu.held_back & one.bit) != 0) json["held_back_by"].push_back(one.name);
  json["extra_bytes"] = row.memory ? ordered_json(row.memory->extra_bytes) : ordered_json(nullptr);
  json["extra_bytes_method"] = row.memory ? ordered_json(row.memory->method) : ordered_json(nullptr);
  json["rss_extra_bytes"] = row.memory && row.memory->rss_measured ? ordered_json(row.memory->rss_extra_bytes) : ordered_json(nullptr);
  json["speedup_over_standard"] = or_null(row.speedup_over_standard);
  json["max_difference_to_standard"] = row.max_difference_to_standard ? number(*row.max_difference_to_standard) : ordered_json(nullptr);
  json["moved_bytes_model"] = or_null(row.moved_bytes);
  json["checks"] = ordered_json::array();
  for (const TensorCheck& c : row.checks)
    json["checks"].push_back({{"tensor", c.tensor},
                              {"error", number(c.error)},
                              {"allowed", number(c.allowed)},
                              {"pass", c.pass},
                              {"where", c.where},
                              {"rms_error", c.rms_peer > 0 ? number(c.rms_error) : ordered_json(nullptr)},
                              {"rms_peer", c.rms_peer > 0 ? number(c.rms_peer) : ordered_json(nullptr)}});
  json["warnings"] = row.warnings;
  return json;
}

ordered_json to_json(const Record& record) {
  Status status = Status::kOk;
  auto rank = [](Status s) { return s == Status::kCheckFailed ? 3 : s == Status::kRefused ? 2 : s == Status::kOk ? 0 : 1; };
  ordered_json rows = ordered_json::array();
  for (const Row& row : record.rows) {
    rows.push_back(to_json(row));
    if (rank(row.status) > rank(status)) status = row.status;
  }
  ordered_json json = {{"fattn_record", kRecordVersion}, {"command", record.command},   {"flags", record.flags},
                       {"status", name_of(status)},      {"complete", record.complete}, {"environment", environment()}};
  json["peaks"] = {{"before", to_json(record.peaks_before)}, {"after", to_json(record.peaks_after)}};
  json["disturbance"] = record.disturbance;
  json["rows"] = std::move(rows);
  json["summary"] = record.summary;
  return json;
}

}  // namespace fattn::measure
