#include "lab/course/race.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <stdexcept>

#include "measure/sampling.h"

namespace fattn::lab {
namespace {

using namespace measure;

Algorithm algorithm_of(const std::string& name) {
  if (name == "standard") return Algorithm::kStandard;
  if (name == "v1") return Algorithm::kV1;
  if (name == "v2") return Algorithm::kV2;
  if (name == "auto") return Algorithm::kAuto;
  throw std::invalid_argument("'" + name + "' is no algorithm of a race");
}

Options options_of(const std::string& algorithm, const Placement& place) {
  Options options;
  options.algorithm = algorithm_of(algorithm);
  if (place.device == Device::kCuda) options.backend = Backend::kCuda;
  return options;
}

// What of the outputs is compared: o, or the gradients.
struct Compared {
  const Pages* pages;
  int64_t count;
};
std::vector<Compared> compared(const Outputs& outputs, const ProblemSpec& s, Pass pass) {
  const auto size = static_cast<int64_t>(size_of(s.dtype));
  if (pass == Pass::kForward) return {{&outputs.o, s.o_bytes() / size}};
  return {{&outputs.dq, s.q_bytes() / size}, {&outputs.dk, s.k_bytes() / size}, {&outputs.dv, s.v_bytes() / size}};
}

double largest(const Pages& pages, DType dtype, int64_t count) {
  const std::vector<unsigned char> zeros(static_cast<size_t>(count) * size_of(dtype), 0);
  return max_difference(pages.data(), zeros.data(), dtype, count);
}

// Empty, or why the outputs are not the first's.
std::string why_not_same(const Outputs& first, const Outputs& other, const ProblemSpec& spec, Pass pass, RaceEntry& entry) {
  const std::vector<Compared> a = compared(first, spec, pass), b = compared(other, spec, pass);
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference = max_difference(a[i].pages->data(), b[i].pages->data(), spec.dtype, a[i].count);
    const double allowed = course_limit(spec.dtype) * std::max(1.0, largest(*a[i].pages, spec.dtype, a[i].count));
    entry.difference = std::max(entry.difference, difference);
    if (!(difference <= allowed)) return fmt::format("its result differs by {:.2g}, and {:.2g} is allowed", difference, allowed);
  }
  return {};
}

}  // namespace

double course_limit(DType dtype) { return dtype == DType::kF16 ? 1e-3 : dtype == DType::kBF16 ? 8e-3 : 1e-5; }

std::vector<RaceEntry> race(const ProblemSpec& spec, Pass pass, const std::vector<std::string>& algorithms, const Placement& place) {
  const bool grad = pass != Pass::kForward;
  const Inputs inputs = make_inputs(spec, grad);
  std::vector<RaceEntry> entries;
  std::vector<std::unique_ptr<Contestant>> contestants;
  std::vector<Sampler> samplers;
  std::vector<size_t> timed;  // of `entries`
  const Outputs* first = nullptr;
  for (const std::string& algorithm : algorithms) {
    RaceEntry& entry = entries.emplace_back();
    entry.algorithm = algorithm;
    const Options options = options_of(algorithm, place);
    contestants.push_back(make_library_contestant(algorithm, options, place));
    Contestant& contestant = *contestants.back();
    try {
      contestant.prepare(spec, inputs, grad, 0);
      entry.extra_bytes = contestant.memory(pass).extra_bytes;
      const Outputs& outputs = contestant.compute();
      if (!first)
        first = &outputs;
      else
        entry.reason = why_not_same(*first, outputs, spec, pass, entry);
    } catch (const std::exception& error) {
      entry.reason = as_failure(error).what();
    }
    if (!entry.ok()) continue;
    timed.push_back(entries.size() - 1);
    samplers.emplace_back([&contestant, pass](int samples, int warmup) { return contestant.time(pass, samples, warmup); });
  }
  SamplingOptions sampling;
  sampling.repeats = 6;
  sampling.min_seconds = 0.03;
  sampling.max_seconds = 0.5;
  sampling.rounds = 3;
  sampling.warmup_seconds = 0.2;
  const auto failed = [&](size_t i, const std::exception& error) { entries[timed[i]].reason = error.what(); };
  const std::vector<Samples> samples = sample_in_turns(samplers, sampling, failed, [](size_t, bool) {});
  for (size_t i = 0; i < samples.size(); ++i)
    if (!samples[i].seconds.empty()) entries[timed[i]].time = summarize(samples[i].seconds);
  return entries;
}

}  // namespace fattn::lab
