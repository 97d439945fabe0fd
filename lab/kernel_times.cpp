#include "lab/kernel_times.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "lab/fit.h"

namespace fattn::lab {
namespace {

using Json = nlohmann::ordered_json;

double each_of(const FamilyTimes& times, const std::string& name) {
  const auto found = times.seconds_each.find(name);
  return found == times.seconds_each.end() ? 0 : found->second;
}

// Both parts overlap, more or less.
double together(double compute, double memory, double overlap) {
  const double more = std::max(compute, memory);
  if (!(more > 0)) return 0;
  return more * std::pow(std::pow(compute / more, overlap) + std::pow(memory / more, overlap), 1 / overlap);
}

double seconds_of(const Work& work, const std::vector<double>& each) {
  double call = 0, compute = 0, memory = 0;
  for (size_t j = 0; j < work.amounts.size(); ++j) {
    const Amount& a = work.amounts[j];
    (a.part == Part::kCall ? call : a.part == Part::kCompute ? compute : memory) += a.count * each[j];
  }
  return call + together(compute, memory, work.overlap);
}

std::vector<double> constants_of(const std::vector<TimedWork>& samples, const std::vector<double>& start, const std::vector<double>& held) {
  std::vector<double> seconds;
  seconds.reserve(samples.size());
  for (const TimedWork& s : samples) seconds.push_back(s.seconds);
  return fit([&](size_t i, const std::vector<double>& each) { return seconds_of(samples[i].work, each); }, seconds, start, held);
}

// None can take longer than the call in which it is the most.
std::vector<double> starts_of(const std::vector<TimedWork>& samples) {
  const size_t n = samples.front().work.amounts.size();
  std::vector<double> start(n, 0.0);
  for (size_t j = 0; j < n; ++j) {
    double least = 0;
    for (const TimedWork& s : samples) {
      const double count = s.work.amounts[j].count;
      if (count > 0 && (least == 0 || s.seconds / count < least)) least = s.seconds / count;
    }
    start[j] = least > 0 ? 0.3 * least : 1e-12;
  }
  return start;
}

double finite(const Json& object, const char* name, double least, double most) {
  if (!object.is_object() || !object.contains(name) || !object[name].is_number())
    throw std::invalid_argument(fmt::format("it has no number '{}'", name));
  const double value = object[name].get<double>();
  if (!(value >= least && value <= most)) throw std::invalid_argument(fmt::format("its '{}' is {}", name, value));
  return value;
}

}  // namespace

Breakdown breakdown_of(const Work& work, const FamilyTimes& times) {
  Breakdown b;
  for (const Amount& a : work.amounts) {
    const double seconds = a.count * each_of(times, a.name);
    b.of_amounts.push_back(seconds);
    (a.part == Part::kCall ? b.call : a.part == Part::kCompute ? b.compute : b.memory) += seconds;
  }
  b.seconds = b.call + together(b.compute, b.memory, work.overlap);
  return b;
}

FamilyTimes fit_family(const std::vector<TimedWork>& samples, const std::map<std::string, double>& expected) {
  FamilyTimes times;
  times.samples = static_cast<int>(samples.size());
  constexpr double kHeld = 0.01, kHardly = 2e-4;
  const std::vector<Amount>& amounts = samples.front().work.amounts;
  std::vector<double> start = starts_of(samples), held(start.size(), kHardly);
  for (size_t j = 0; j < amounts.size(); ++j)
    if (const auto known = expected.find(amounts[j].name); known != expected.end()) {
      start[j] = known->second;
      held[j] = kHeld;
    }
  const std::vector<double> each = constants_of(samples, start, held);
  for (size_t j = 0; j < amounts.size(); ++j) times.seconds_each[amounts[j].name] = each[j];
  // A tenth at a time is left out, and predicted from the others.
  constexpr size_t kParts = 10;
  std::vector<double> errors;
  for (size_t part = 0; part < kParts; ++part) {
    std::vector<TimedWork> others, left_out;
    for (size_t i = 0; i < samples.size(); ++i) (i % kParts == part ? left_out : others).push_back(samples[i]);
    if (left_out.empty() || others.size() < 2) continue;
    const std::vector<double> constants = constants_of(others, start, held);
    for (const TimedWork& s : left_out) errors.push_back(std::fabs(seconds_of(s.work, constants) / s.seconds - 1));
  }
  if (errors.empty()) return times;
  times.mean_error = std::accumulate(errors.begin(), errors.end(), 0.0) / static_cast<double>(errors.size());
  std::sort(errors.begin(), errors.end());
  times.error_90 = errors[std::min(errors.size() - 1, errors.size() * 9 / 10)];
  return times;
}

const FamilyTimes* KernelTimes::of(const std::string& family) const {
  const auto found = families.find(family);
  return found == families.end() ? nullptr : &found->second;
}

Json to_json(const KernelTimes& times) {
  Json families = Json::object();
  for (const auto& [name, family] : times.families) {
    Json each = Json::object();
    for (const auto& [amount, seconds] : family.seconds_each) each[amount] = seconds;
    families[name] = {
        {"samples", family.samples}, {"mean_error_fraction", family.mean_error}, {"error_90_fraction", family.error_90}, {"seconds_each", each}};
  }
  Json too_few = Json::object();
  for (const auto& [name, calls] : times.too_few) too_few[name] = calls;
  return {{"seconds", times.seconds},
          {"reach_fraction", times.reach ? Json(*times.reach) : Json(nullptr)},
          {"reach_calls", times.reach_calls},
          {"families", families},
          {"too_few", too_few}};
}

KernelTimes kernel_times_from_json(const Json& json) {
  KernelTimes times;
  constexpr double kMost = 1e9;
  times.seconds = finite(json, "seconds", 0, kMost);
  if (json.contains("reach_fraction") && !json["reach_fraction"].is_null()) {  // records from before lack it
    times.reach = finite(json, "reach_fraction", 1e-6, kMost);
    times.reach_calls = static_cast<int>(finite(json, "reach_calls", 1, 1e6));
  }
  if (json.contains("too_few")) {  // records from before lack it
    if (!json["too_few"].is_object()) throw std::invalid_argument("its 'too_few' is no object");
    for (const auto& [name, calls] : json["too_few"].items()) times.too_few[name] = static_cast<int>(finite(json["too_few"], name.c_str(), 0, 1e6));
  }
  if (!json.contains("families") || !json["families"].is_object()) throw std::invalid_argument("it has no 'families'");
  for (const auto& [name, object] : json["families"].items()) {
    FamilyTimes& family = times.families[name];
    family.samples = static_cast<int>(finite(object, "samples", 0, 1e6));
    family.mean_error = finite(object, "mean_error_fraction", 0, kMost);
    family.error_90 = finite(object, "error_90_fraction", 0, kMost);
    if (!object.contains("seconds_each") || !object["seconds_each"].is_object()) throw std::invalid_argument("a family has no 'seconds_each'");
    for (const auto& [amount, seconds] : object["seconds_each"].items()) {
      if (!seconds.is_number() || !(seconds.get<double>() >= 0 && seconds.get<double>() <= kMost))
        throw std::invalid_argument(fmt::format("seconds of '{}' are no number from 0 on", amount));
      family.seconds_each[amount] = seconds.get<double>();
    }
  }
  return times;
}

}  // namespace fattn::lab
