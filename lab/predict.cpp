#include "lab/predict.h"

#include <algorithm>

namespace fattn::lab {

using measure::Pass;
using measure::ProblemSpec;

namespace {

// What a prediction counts, it counts tile by tile and task by task: beyond these that takes longer than a second.
constexpr int64_t kMostKeys = int64_t{1} << 19, kMostTasks = int64_t{1} << 23;

std::string too_large(const ProblemSpec& s) {
  const int64_t longest = std::max(s.seqlen_q, s.seqlen_k), tiles = (longest + 63) / 64;
  if (longest > kMostKeys)
    return "the model of time counts up to " + std::to_string(kMostKeys) + " queries and keys, here are " + std::to_string(longest);
  if (s.batch > kMostTasks || s.nheads > kMostTasks || s.batch * s.nheads > kMostTasks / std::max<int64_t>(tiles, 1))
    return "the model of time counts up to " + std::to_string(kMostTasks) + " tiles of 64 rows in all heads; predict a part of the batch";
  return "";
}

}  // namespace

std::string not_modelled(const ProblemSpec& s) {
  std::string names;
  const auto add = [&](bool there, const char* name) {
    if (there) names += (names.empty() ? "" : ", ") + std::string(name);
  };
  add(s.softcap > 0, "softcap");
  add(s.p_dropout > 0, "dropout");
  add(s.alibi, "ALiBi");
  add(s.bias != measure::PairShape::kNone, "a bias");
  add(s.mask != measure::PairShape::kNone, "a mask of pairs");
  add(s.least_seqused_k > 0, "lengths of keys");
  add(s.packed(), "packed sequences");
  add(s.documents > 0, "documents");
  add(s.page_size > 0, "a paged cache");
  return names;
}

ProblemSpec without_what_is_not_modelled(ProblemSpec s) {
  s.softcap = 0, s.p_dropout = 0, s.alibi = false;
  s.bias = s.mask = measure::PairShape::kNone;
  s.dbias = s.bias_f32 = false;
  s.least_seqused_k = s.least_packed = s.documents = s.page_size = 0;
  return s;
}

Prediction Predictor::of(const ProblemSpec& spec, Pass pass) const {
  if (pass == Pass::kForwardBackward) return both(spec);
  const PlanShape shape = plan_shape(spec, pass, library_, place_);
  Prediction p;
  p.spec = spec;
  p.pass = pass;
  p.kernel = shape.kernel;
  p.why = shape.why;
  p.workspace_bytes = shape.workspace_bytes;
  p.extra_bytes = spec.output_bytes(pass != Pass::kForward) + shape.workspace_bytes;
  p.flops = shape.flops;
  if (p.unknown = too_large(spec); !p.unknown.empty()) return p;
  p.work = work_of(spec, shape, sizes_);
  p.family = p.work.family;
  if (const std::string names = not_modelled(spec); !names.empty()) {
    p.unknown =
        "the model of time has no price of " + names + "; `fattn bench` measures such calls, and `fattn bench --suite prices` what each option costs";
    p.plain_seconds = of(without_what_is_not_modelled(spec), pass).seconds;
    return p;
  }
  const FamilyTimes* family = times_.of(p.family);
  if (!family) {
    p.unknown =
        shape.algorithm == Algorithm::kV1
            ? "algorithm v1 is there to compare with, and `fattn calibrate` does not time it; `fattn bench --algorithm v1` does"
            : "the calibration has no constants of '" + p.family +
                  "', which it timed too seldom; on a quiet machine, or with --kernel-seconds 120, `fattn calibrate --force` times more calls";
    return p;
  }
  constexpr double kLeast = 0.03;  // a machine is hardly steadier
  p.breakdown = breakdown_of(p.work, *family);
  p.seconds = p.breakdown.seconds;
  const double off = std::max(family->error_90, kLeast);
  p.low = *p.seconds / (1 + off);
  p.high = *p.seconds * (1 + off);
  const std::vector<double>& each = p.breakdown.of_amounts;
  const auto most = std::max_element(each.begin(), each.end());
  if (most != each.end()) p.binds = p.work.amounts[static_cast<size_t>(most - each.begin())].name;
  return p;
}

// One pass behind the other, in the larger workspace of both.
Prediction Predictor::both(const ProblemSpec& spec) const {
  const Prediction forward = of(spec, Pass::kForward);
  Prediction p = of(spec, Pass::kBackward);
  p.pass = Pass::kForwardBackward;
  p.kernel = forward.kernel + ", " + p.kernel;
  p.family = forward.family + ", " + p.family;
  p.why.clear();
  p.flops += forward.flops;
  p.extra_bytes += std::max<int64_t>(0, forward.workspace_bytes - p.workspace_bytes);
  p.workspace_bytes = std::max(p.workspace_bytes, forward.workspace_bytes);
  if (!forward.seconds || !p.seconds) {
    if (p.unknown.empty()) p.unknown = forward.unknown;
    p.seconds.reset();
    if (forward.plain_seconds && p.plain_seconds) p.plain_seconds = *p.plain_seconds + *forward.plain_seconds;
    return p;
  }
  if (*forward.seconds > *p.seconds) p.binds = forward.binds;
  p.seconds = *p.seconds + *forward.seconds;
  p.low += forward.low;
  p.high += forward.high;
  p.work = Work();
  p.breakdown = Breakdown();
  return p;
}

}  // namespace fattn::lab
