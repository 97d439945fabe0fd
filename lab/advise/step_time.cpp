#include "lab/advise/step_time.h"
#include "lab/parts.h"

#include <fmt/format.h>

#include <algorithm>

#include "measure/traffic.h"

namespace fattn::lab {
namespace {

using measure::Pass;
using measure::ProblemSpec;

// By the rates alone: the longer of its FLOPs and the bytes that its algorithm moves.
double attention_by_rates(const StepPlan& p, const StepRates& rates) {
  const ProblemSpec spec = attention_of(p);
  const Pass pass = p.task == Task::kTrain ? Pass::kForwardBackward : Pass::kForward;
  const double pairs = real(spec.batch) * real(spec.nheads) * real(spec.seqlen_q) * real(spec.seqlen_k) * (p.standard ? 1 : 0.5);
  const double flops = 4 * real(spec.headdim) * pairs * (p.task == Task::kTrain ? 3.5 : 1);
  const double bytes = p.standard ? measure::moved_bytes("standard", spec, pass).value_or(0)
                                  : 8 * real(spec.batch) * real(spec.nheads) * real(spec.seqlen_q) * real(spec.headdim) * real(size_of(spec.dtype));
  return std::max(flops / rates.flops_per_s, bytes / rates.bytes_per_s);
}

}  // namespace

ProblemSpec attention_of(const StepPlan& p) {
  ProblemSpec s;
  s.batch = p.batch;
  s.seqlen_q = s.seqlen_k = p.seqlen;
  s.nheads = s.nheads_k = p.model.nheads;
  s.headdim = s.headdim_v = p.model.headdim();
  s.causal = true;
  s.dtype = p.precision == Precision::kFP32 ? DType::kF32 : p.precision == Precision::kFP16 ? DType::kF16 : DType::kBF16;
  return s;
}

StepTime time_of(const StepPlan& p, const StepRates& rates) {
  StepTime time;
  const auto add = [&](const char* what, double seconds, std::string arithmetic) {
    time.lines.push_back({what, std::move(arithmetic), seconds});
    time.seconds += seconds;
  };
  const ModelSize& m = p.model;
  const bool trains = p.task == Task::kTrain;
  const double tokens = real(p.batch) * real(p.seqlen), multiplied = real(m.multiplied_parameters());
  const double times = trains ? p.checkpointing ? 8 : 6 : 2;
  add("products", times * multiplied * tokens / rates.flops_per_s,
      fmt::format("{:.0f} * {:.3g} parameters * {:.0f} tokens / {:.3g} FLOP/s", times, multiplied, tokens, rates.flops_per_s));
  const double again = trains && p.checkpointing ? 4.5 / 3.5 : 1;
  const double attention = rates.attention ? rates.attention(p) : attention_by_rates(p, rates);
  time.attention = real(m.layers) * attention * again;
  add(p.standard ? "standard attention" : "attention", time.attention,
      fmt::format("{} layers * {:.3g} s{}", m.layers, attention, again > 1 ? " * 4.5 / 3.5, its forward pass twice" : ""));
  // Norms, activations, sums: what a block keeps is written and read about three times over.
  const double e = p.precision == Precision::kFP32 ? 4 : 2, of_token = (10 + 14 * e) * real(m.width), passes = trains ? p.checkpointing ? 4 : 3 : 1.5;
  add("norms and activations", passes * real(m.layers) * tokens * of_token / rates.bytes_per_s,
      fmt::format("{:g} * {} layers * {:.0f} tokens * {:.0f} B / {:.3g} B/s", passes, m.layers, tokens, of_token, rates.bytes_per_s));
  const double logits = trains ? tokens * real(m.vocabulary) * 14 * 2 : real(p.batch) * real(m.vocabulary) * 6;
  add("logits and loss", logits / rates.bytes_per_s, fmt::format("{:.3g} B / {:.3g} B/s", logits, rates.bytes_per_s));
  return time;
}

double optimizer_seconds(const StepPlan& p, const StepRates& rates) {
  // Weights, gradients and moments read, weights and moments written.
  return 28 * real(p.model.parameters(p.seqlen)) / rates.bytes_per_s;
}

std::optional<StepRates> measured_rates(const StepPlan& plan, const KernelTimes& times, double bytes_per_s, const measure::Placement& place,
                                        std::string& why) {
  const bool cuda = place.device == Device::kCuda;
  Options standard, automatic;
  standard.algorithm = Algorithm::kStandard;
  const ProblemSpec spec = attention_of(plan);
  StepRates rates;
  rates.bytes_per_s = bytes_per_s;
  if (!(bytes_per_s > 0)) {
    why = "the calibration has no rate of memory";
    return std::nullopt;
  }
  try {
    // The products of standard attention are those of matrices, by the library that other layers use, too.
    const PlanShape shape = plan_shape(spec, Pass::kForward, standard, place);
    const Work work = work_of(spec, shape, machine_sizes(place));
    const FamilyTimes* family = times.of(work.family);
    const double each = family && family->seconds_each.count("products") > 0 ? family->seconds_each.at("products") : 0;
    if (!(each > 0)) {
      why = "the calibration has no constants of '" + work.family + "'";
      return std::nullopt;
    }
    rates.flops_per_s = 2 / each * (cuda ? 1 : shape.threads);
    const auto fast = std::make_shared<const Predictor>(times, automatic, place);
    const auto slow = std::make_shared<const Predictor>(times, standard, place);
    const Pass pass = plan.task == Task::kTrain ? Pass::kForwardBackward : Pass::kForward;
    // Whether both can be predicted, asked once, of a batch of 1.
    StepPlan one = plan;
    one.batch = 1;
    if (!fast->of(attention_of(one), pass).seconds) {
      why = fast->of(attention_of(one), pass).unknown;
      return std::nullopt;
    }
    rates.attention = [fast, slow, pass](const StepPlan& p) {
      const Predictor& predictor = p.standard ? *slow : *fast;
      try {
        return predictor.of(attention_of(p), pass).seconds.value_or(0);
      } catch (const std::exception&) {  // standard attention of sizes that no machine has
        return 0.0;
      }
    };
    rates.words = "measured by `fattn calibrate` on this machine";
  } catch (const std::exception& error) {
    why = error.what();
    return std::nullopt;
  }
  return rates;
}

}  // namespace fattn::lab
