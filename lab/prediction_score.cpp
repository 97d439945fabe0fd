#include "lab/prediction_score.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace fattn::lab {
namespace {

using Json = nlohmann::ordered_json;
using measure::Pass;
using measure::ProblemSpec;

int64_t integer(const Json& row, const char* name, int64_t least, int64_t otherwise) {
  if (!row.contains(name) || row[name].is_null()) return otherwise;
  constexpr int64_t kMost = int64_t{1} << 48;
  if (!row[name].is_number_integer() || row[name].get<int64_t>() < least || row[name].get<int64_t>() > kMost)
    throw RecordError(fmt::format("'{}' of a row is no size", name));
  return row[name].get<int64_t>();
}

bool flag(const Json& row, const char* name) { return row.contains(name) && row[name].is_boolean() && row[name].get<bool>(); }

double number(const Json& row, const char* name) { return row.contains(name) && row[name].is_number() ? row[name].get<double>() : 0; }

std::string text(const Json& row, const char* name) { return row.contains(name) && row[name].is_string() ? row[name].get<std::string>() : ""; }

measure::PairShape pair_shape(const std::string& name) {
  for (const measure::PairShape shape : measure::kPairShapes)
    if (name == measure::name_of(shape)) return shape;
  return measure::PairShape::kNone;
}

// Of an environment, what its times depend on.
std::string machine_of(const Json& environment, const measure::Placement& place) {
  if (!environment.is_object()) return "";
  if (place.device == Device::kCuda) {
    const auto index = static_cast<size_t>(place.index);
    const bool there = environment.contains("gpus") && environment["gpus"].is_array() && environment["gpus"].size() > index;
    return there ? text(environment["gpus"][index], "name") : "no GPU";
  }
  if (!environment.contains("cpu") || !environment["cpu"].is_object()) return "";
  const Json& cpu = environment["cpu"];
  return fmt::format("{} {}, {} threads, {}", text(cpu, "vendor"), text(cpu, "model"), number(cpu, "usable_threads"), text(cpu, "isa_default"));
}

// By this library: "fattn", "standard" of it, or an algorithm that was asked for by its name.
bool computed_here(const Json& row) {
  const std::string provider = text(row, "provider"), algorithm = text(row, "algorithm");
  if (provider == "fattn" || provider == name_of(Algorithm::kStandard)) return true;
  return provider == algorithm && (provider == name_of(Algorithm::kV1) || provider == name_of(Algorithm::kV2) || provider == name_of(Algorithm::kV3));
}

// Of a row, where and how it was computed.
Options options_of(const Json& row, const measure::Placement& place) {
  Options options;
  if (text(row, "algorithm") == name_of(Algorithm::kStandard) && text(row, "backend") != "reference") options.algorithm = Algorithm::kStandard;
  for (const Algorithm algorithm : {Algorithm::kV1, Algorithm::kV2})
    if (text(row, "algorithm") == name_of(algorithm)) options.algorithm = algorithm;
  if (text(row, "backend") == "reference") options.backend = Backend::kReference, options.algorithm = Algorithm::kAuto;
  if (place.device != Device::kCpu) {
    // v2 by itself where v3 cannot, or as it was asked for: the kernel's name does not say which.
    options.backend = Backend::kCuda;
    return options;
  }
  options.num_threads = static_cast<int>(integer(row, "threads", 0, 0));
  for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmx, Isa::kNeon})
    if (text(row, "isa") == name_of(isa)) options.cpu_isa = isa;
  return options;
}

}  // namespace

Score score_of(const std::vector<Scored>& rows, Pass pass) {
  Score score;
  std::vector<double> errors;
  double inside = 0;
  for (const Scored& row : rows) {
    const Prediction& p = row.prediction;
    if (p.pass != pass) continue;
    if (row.measured_bytes) {
      ++score.memory_count;
      if (*row.measured_bytes == p.extra_bytes) ++score.memory_exact;
    }
    if (!row.counts()) continue;
    const double error = row.error();
    errors.push_back(std::fabs(error));
    score.bias += error;
    inside += row.measured->median >= p.low && row.measured->median <= p.high ? 1 : 0;
    if (errors.size() > 1 && !(std::fabs(error) > std::fabs(score.worst_error))) continue;
    score.worst_error = error;
    score.worst = measure::describe(p.spec);
  }
  score.count = static_cast<int>(errors.size());
  if (errors.empty()) return score;
  for (const double e : errors) score.mean_error += e;
  const auto n = static_cast<double>(errors.size());
  score.mean_error /= n;
  score.bias /= n;
  score.covered = inside / n;
  std::sort(errors.begin(), errors.end());
  // The least of which 95 % are no larger.
  score.error_95 = errors[static_cast<size_t>(std::ceil(0.95 * n)) - 1];
  return score;
}

Json to_json(const Score& s) {
  const auto known = [&](double value) { return s.count > 0 ? Json(value) : Json(nullptr); };
  return {{"count", s.count},
          {"mean_absolute_error_fraction", known(s.mean_error)},
          {"error_95_fraction", known(s.error_95)},
          {"bias_fraction", known(s.bias)},
          {"covered_fraction", known(s.covered)},
          {"worst", s.count > 0 ? Json(s.worst) : Json(nullptr)},
          {"worst_error_fraction", known(s.worst_error)},
          {"memory_count", s.memory_count},
          {"memory_exact", s.memory_exact}};
}

Json to_json(const Scored& row) {
  const Prediction& p = row.prediction;
  Json json = measure::to_json(p.spec);
  json["pass"] = measure::name_of(p.pass);
  json["kernel"] = p.kernel;
  json["family"] = p.family;
  json["flops"] = p.flops;
  json["extra_bytes"] = p.extra_bytes;
  json["workspace_bytes"] = p.workspace_bytes;
  json["predicted_s"] = p.seconds ? Json(*p.seconds) : Json(nullptr);
  json["predicted_low_s"] = p.seconds ? Json(p.low) : Json(nullptr);
  json["predicted_high_s"] = p.seconds ? Json(p.high) : Json(nullptr);
  json["unknown"] = p.seconds ? Json(nullptr) : Json(p.unknown);
  if (p.plain_seconds) json["without_options_s"] = *p.plain_seconds;
  json["binds"] = p.binds.empty() ? Json(nullptr) : Json(p.binds);
  Json amounts = Json::array();
  for (size_t i = 0; p.seconds && i < p.work.amounts.size(); ++i) {
    const Amount& a = p.work.amounts[i];
    amounts.push_back({{"name", a.name}, {"part", name_of(a.part)}, {"count", a.count}, {"seconds", p.breakdown.of_amounts[i]}});
  }
  json["amounts"] = std::move(amounts);
  json["measured_s"] = row.measured ? Json(row.measured->median) : Json(nullptr);
  json["measured_low_s"] = row.measured ? Json(row.measured->ci_low) : Json(nullptr);
  json["measured_high_s"] = row.measured ? Json(row.measured->ci_high) : Json(nullptr);
  json["samples"] = row.measured ? Json(row.measured->samples) : Json(nullptr);
  json["measured_extra_bytes"] = row.measured_bytes ? Json(*row.measured_bytes) : Json(nullptr);
  json["error_fraction"] = row.counts() ? Json(row.error()) : Json(nullptr);
  json["reason"] = row.reason.empty() ? Json(nullptr) : Json(row.reason);
  return json;
}

ProblemSpec spec_from_json(const Json& row) {
  if (!row.is_object()) throw RecordError("a row is no object");
  ProblemSpec s;
  for (const char* name : {"batch", "seqlen_q", "seqlen_k", "nheads", "nheads_k", "headdim", "headdim_v"})
    if (!row.contains(name)) throw RecordError(fmt::format("a row has no '{}'", name));
  s.batch = integer(row, "batch", 1, 1);
  s.seqlen_q = integer(row, "seqlen_q", 1, 1);
  s.seqlen_k = integer(row, "seqlen_k", 1, 1);
  s.nheads = integer(row, "nheads", 1, 1);
  s.nheads_k = integer(row, "nheads_k", 1, 1);
  s.headdim = integer(row, "headdim", 1, 1);
  s.headdim_v = integer(row, "headdim_v", 1, 1);
  s.causal = flag(row, "causal");
  s.window_left = integer(row, "window_left", -1, -1);
  s.window_right = integer(row, "window_right", -1, -1);
  s.softcap = number(row, "softcap");
  s.p_dropout = number(row, "p_dropout");
  s.alibi = flag(row, "alibi");
  s.bias = pair_shape(text(row, "bias"));
  s.mask = pair_shape(text(row, "mask"));
  s.dbias = flag(row, "dbias");
  s.bias_f32 = text(row, "bias_dtype") == name_of(DType::kF32);
  s.least_seqused_k = integer(row, "least_seqused_k", 0, 0);
  s.least_packed = integer(row, "least_packed", 0, 0);
  s.documents = integer(row, "documents", 0, 0);
  s.page_size = integer(row, "page_size", 0, 0);
  s.seed = static_cast<uint64_t>(integer(row, "seed", 0, 1));
  bool known = false;
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16, DType::kF64})
    if (text(row, "dtype") == name_of(dtype)) s.dtype = dtype, known = true;
  if (!known) throw RecordError("a row's 'dtype' is none that attention has");
  return s;
}

std::vector<Scored> score_record(const Json& record, const Json& environment_here, const KernelTimes& times, const measure::Placement& place) {
  if (!record.is_object() || !record.contains("rows") || !record["rows"].is_array())
    throw RecordError("it is no record of bench, compare, a suite or a sweep: it has no 'rows'");
  const Json environment = record.contains("environment") ? record["environment"] : Json();
  const std::string there = machine_of(environment, place), here = machine_of(environment_here, place);
  if (there != here)
    throw RecordError(fmt::format("it was made on another machine ('{}', here is '{}'), whose times this one's constants do not say; score it there",
                                  there.empty() ? "unknown" : there, here));
  std::vector<Scored> scored;
  for (const Json& row : record["rows"]) {
    if (!row.is_object()) throw RecordError("a row is no object");
    if (!computed_here(row) || text(row, "status") != "ok" || !(number(row, "time_median_s") > 0)) continue;
    const bool on_gpu = text(row, "device").rfind("cuda", 0) == 0 || text(row, "backend") == name_of(Backend::kCuda);
    if (on_gpu != (place.device == Device::kCuda)) continue;
    std::optional<Pass> pass;
    for (const Pass p : {Pass::kForward, Pass::kBackward, Pass::kForwardBackward})
      if (text(row, "pass") == measure::name_of(p)) pass = p;
    if (!pass) throw RecordError("a row's 'pass' is none of fwd, bwd and fwdbwd");
    Scored s;
    try {
      const Predictor predictor(times, options_of(row, place), place);
      s.prediction = predictor.of(spec_from_json(row), *pass);
    } catch (const RecordError&) {
      throw;
    } catch (const std::exception& error) {  // this library, or this machine, cannot compute it
      s.prediction.spec = spec_from_json(row);
      s.prediction.pass = *pass;
      s.prediction.unknown = error.what();
    }
    measure::Statistics time;
    time.median = number(row, "time_median_s");
    time.ci_low = number(row, "time_ci_low_s");
    time.ci_high = number(row, "time_ci_high_s");
    time.samples = static_cast<size_t>(integer(row, "samples", 0, 1));
    s.measured = time;
    if (row.contains("extra_bytes") && row["extra_bytes"].is_number_integer() && text(row, "extra_bytes_method") == "allocated")
      s.measured_bytes = row["extra_bytes"].get<int64_t>();
    scored.push_back(std::move(s));
  }
  if (scored.empty())
    throw RecordError(fmt::format("it has no row that fattn computed and timed on {}", place.device == Device::kCuda ? "a GPU" : "the CPU"));
  return scored;
}

}  // namespace fattn::lab
