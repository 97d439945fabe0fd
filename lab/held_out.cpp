#include "lab/held_out.h"

#include <fmt/format.h>

#include <algorithm>

#include "fattn/device.hpp"
#include "fattn/system.hpp"
#include "lab/call_timer.h"

namespace fattn::lab {

using Json = nlohmann::ordered_json;
using measure::Pass;
using measure::ProblemSpec;

HeldOutRule rule_of(const Calibration& c, const HeldOutOptions& options, const measure::Placement& place) {
  const bool cuda = place.device == Device::kCuda;
  const double peak = c.of(cuda ? "matrix_flops_per_s" : "fma_flops_per_s"), peak_f32 = cuda ? std::max(peak / 3, c.of("fma_flops_per_s")) : peak;
  constexpr int64_t kGiB = int64_t{1} << 30;
  // Whole gigabytes of what the machine has, not of what happens to be free: the same shapes every day.
  const int64_t memory = std::max(kGiB, static_cast<int64_t>(c.fact("memory_bytes")) / 2 / kGiB * kGiB);
  const int64_t host = std::max(kGiB, cpu_info().memory_bytes / 2 / kGiB * kGiB);
  HeldOutRule rule;
  rule.limit = limit_of(options.seconds, peak, peak_f32, std::min(memory, host));
  rule.words = fmt::format(
      "batch 1..32, seqlen 1..16384, nheads 1..64, headdim 32..256 in steps of 8, all log-uniform; a quarter with 1 to 8 queries, half with fewer "
      "heads "
      "of keys, half causal; a shape is drawn again where forward and backward together have more than {:.3g} FLOP (fp32 {:.3g}, fp64 {:.3g}), which "
      "is {:g} s at 0.4 of the peak, or all tensors more than {:.3g} bytes",
      rule.limit.flops, rule.limit.flops_f32, cuda ? 0 : rule.limit.flops_f64, options.seconds, static_cast<double>(rule.limit.bytes));
  return rule;
}

std::vector<ProblemSpec> held_out_shapes(const HeldOutOptions& options, const HeldOutRule& rule, const measure::Placement& place) {
  ShapeRange range;
  if (place.device == Device::kCuda) range.dtypes = {DType::kF32, DType::kF16, DType::kBF16};  // fp64 is of the reference backend, on the CPU
  Shapes shapes(options.seed, range);
  std::vector<ProblemSpec> specs;
  specs.reserve(static_cast<size_t>(options.count));
  for (int i = 0; i < options.count; ++i) specs.push_back(shapes.within(rule.limit));
  return specs;
}

std::vector<Scored> measure_shape(const ProblemSpec& spec, const Predictor& predictor) {
  std::vector<Scored> rows;
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    Scored row;
    row.prediction.spec = spec;
    row.prediction.pass = pass;
    try {
      row.prediction = predictor.of(spec, pass);
    } catch (const std::exception& error) {
      row.reason = error.what();
    }
    rows.push_back(std::move(row));
  }
  try {
    CallTimer timer(predictor.library(), predictor.place());
    timer.prepare(spec, true);
    TimingOptions timing;
    timing.seconds = 0.1;
    timing.fewest_samples = measure::kFewestSamples;
    timing.most_samples = 100;
    for (Scored& row : rows) row.measured = measure::summarize(timer.time(row.prediction.pass, timing));
    for (Scored& row : rows) row.measured_bytes = timer.extra_bytes(row.prediction.pass);
  } catch (const std::exception& error) {
    for (Scored& row : rows)
      if (!row.measured && row.reason.empty()) row.reason = error.what();
  }
  return rows;
}

Scored kept_row(const Json& row, const Predictor& predictor) {
  Scored scored;
  const ProblemSpec spec = spec_from_json(row);
  const bool backward = row.contains("pass") && row["pass"] == measure::name_of(Pass::kBackward);
  const Pass pass = backward ? Pass::kBackward : Pass::kForward;
  scored.prediction.spec = spec;
  scored.prediction.pass = pass;
  if (row.contains("reason") && row["reason"].is_string()) scored.reason = row["reason"].get<std::string>();
  try {
    scored.prediction = predictor.of(spec, pass);
  } catch (const std::exception& error) {
    scored.prediction.unknown = error.what();
  }
  if (!row.contains("measured_s") || !row["measured_s"].is_number()) return scored;
  measure::Statistics time;
  const auto number = [&](const char* name) { return row.contains(name) && row[name].is_number() ? row[name].get<double>() : time.median; };
  time.median = row["measured_s"].get<double>();
  if (!(time.median > 0)) throw RecordError("'measured_s' of a row is no time");
  time.ci_low = number("measured_low_s");
  time.ci_high = number("measured_high_s");
  time.samples = row.contains("samples") && row["samples"].is_number_unsigned() ? row["samples"].get<size_t>() : 1;
  scored.measured = time;
  if (row.contains("measured_extra_bytes") && row["measured_extra_bytes"].is_number_integer())
    scored.measured_bytes = row["measured_extra_bytes"].get<int64_t>();
  return scored;
}

}  // namespace fattn::lab
