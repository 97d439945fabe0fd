// Calibration on slices: the kernel, the threads and the length of the sequences are those of the problem as far as a slice has room for them.
#include "measure/estimate.h"

#include <algorithm>
#include <cmath>

namespace fattn::measure {
namespace {

// Of a forward call. A GPU is filled by no less than that, and begins where the CPU has long ended.
constexpr double kFirstFlopsCpu = 4e6, kFirstFlopsCuda = 1e12;
constexpr double kLongEnoughCpu = 0.04, kLongEnoughCuda = 0.01;  // seconds: a hundred times what starting a call costs
constexpr double kSlowestGrowth = 3, kFastestGrowth = 64;
constexpr double kGrowing = 0.5;  // of the time a FLOP takes on average, what one more takes
constexpr int kMostSlices = 8;

double forward_flops(const ProblemSpec& spec) { return cost_of(spec, Pass::kForward).flops; }

void shorten(ProblemSpec& s, double factor) {
  const auto shorter = [&](int64_t length) { return std::max<int64_t>(1, std::llround(static_cast<double>(length) * factor)); };
  s.seqlen_q = shorter(s.seqlen_q);
  s.seqlen_k = shorter(s.seqlen_k);
  if (s.packed() || s.documents > 0) s.seqlen_k = s.seqlen_q;
  if (s.page_size > 0) s.seqlen_k = std::max<int64_t>(1, s.seqlen_k / s.page_size) * s.page_size;
  if (s.least_seqused_k > 0) s.least_seqused_k = std::min(shorter(s.least_seqused_k), s.seqlen_k);
  if (s.packed()) s.least_packed = std::min(shorter(s.least_packed), s.seqlen_q);
  s.documents = std::min(s.documents, s.seqlen_q);
}

}  // namespace

ProblemSpec slice_of(const ProblemSpec& spec, double flops) {
  ProblemSpec s = spec;
  const int64_t group = std::max<int64_t>(1, spec.nheads / std::max<int64_t>(1, spec.nheads_k));
  const auto fewer = [&](int64_t count) {
    return std::clamp<int64_t>(static_cast<int64_t>(static_cast<double>(count) * flops / std::max(forward_flops(s), 1.0)), 1, count);
  };
  s.batch = fewer(s.batch);
  s.nheads_k = fewer(s.nheads_k);
  s.nheads = s.nheads_k * group;
  // A window leaves fewer pairs than the square of the length: more than one step.
  for (int step = 0; step < 8 && forward_flops(s) > 1.05 * flops && (s.seqlen_q > 1 || s.seqlen_k > 1); ++step) {
    const int64_t before = s.seqlen_q + s.seqlen_k;
    shorten(s, std::sqrt(flops / forward_flops(s)));
    if (s.seqlen_q + s.seqlen_k == before) break;
  }
  return s;
}

double telling_flops(const CallSeconds& other, const ProblemSpec& spec) {
  return other.forward > 0 ? kLongEnoughCpu / other.forward * forward_flops(spec) : 0;
}

CallSeconds estimate_calls(Contestant& contestant, const ProblemSpec& spec, bool grad, int64_t memory_limit, const Placement& place,
                           double telling_flops) {
  const bool on_cpu = place.device == Device::kCpu;
  CallSeconds seconds;
  try {
    contestant.accept(spec, grad, memory_limit);
    // The fastest of some: first calls start threads and fill caches, and whoever else runs takes turns.
    const auto call = [&](Pass pass, int samples) {
      const std::vector<double> times = contestant.time(pass, samples, 1);
      return *std::min_element(times.begin(), times.end());
    };
    const double enough = on_cpu ? kLongEnoughCpu : kLongEnoughCuda, whole = forward_flops(spec);
    double flops = telling_flops > 0 ? telling_flops : on_cpu ? kFirstFlopsCpu : kFirstFlopsCuda, flops_before = 0, time_before = 0;
    bool last = false;
    for (int i = 1; !last; ++i) {
      const ProblemSpec slice = slice_of(spec, flops);
      const Inputs inputs = make_inputs(slice, grad);
      contestant.prepare(slice, inputs, grad, memory_limit);
      const double flops_here = std::max(forward_flops(slice), 1.0);
      double forward = call(Pass::kForward, 1);
      if (forward >= enough) forward = std::min(forward, call(Pass::kForward, 2));
      // What more FLOPs take. Threads that wait for each other on a busy machine take long for few FLOPs, and no longer for some more: then the slice
      // is too small to say anything.
      const double each = forward / flops_here, more = (forward - time_before) / std::max(flops_here - flops_before, 1.0);
      const bool grows = telling_flops > 0 || (i > 1 && more >= kGrowing * each);
      last = (forward >= enough && grows) || slice == spec || i == kMostSlices;
      if (last) {
        seconds.forward = slice == spec ? forward : forward + std::clamp(more, kGrowing * each, each / kGrowing) * (whole - flops_here);
        if (grad) seconds.backward = call(Pass::kBackward, 2) * seconds.forward / forward;
      }
      contestant.release();
      flops_before = flops_here;
      time_before = forward;
      flops *= std::clamp(1.5 * enough / std::max(forward, 1e-9), kSlowestGrowth, kFastestGrowth);
    }
  } catch (const std::exception&) {  // its row will say why
    seconds = {};
  }
  return seconds;
}

double flops_worth_an_estimate(const Placement& place) { return place.device == Device::kCpu ? 1e9 : 1e15; }

double StepSeconds::total(const SamplingOptions& sampling) const {
  double total = check;
  for (const OfPass& pass : passes) total += pass.memory + pass.sampling.warm_up + rounds_of(sampling) * pass.sampling.turn;
  return total;
}

StepSeconds seconds_of_steps(const CallSeconds& calls, const std::vector<Pass>& passes, bool grad, const SamplingOptions& sampling, double fixed) {
  StepSeconds steps;
  steps.check = fixed + calls.of(grad ? Pass::kForwardBackward : Pass::kForward);
  for (const Pass pass : passes)  // of memory one call, for gradients after a forward pass
    steps.passes.push_back({calls.of(pass) + (pass == Pass::kForward ? 0 : calls.forward), seconds_of(calls.of(pass), sampling)});
  return steps;
}

}  // namespace fattn::measure
