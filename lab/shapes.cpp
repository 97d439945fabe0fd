#include "lab/shapes.h"

#include <algorithm>
#include <cmath>

namespace fattn::lab {

using measure::ProblemSpec;

bool ShapeLimit::admits(const ProblemSpec& spec) const {
  const double most = spec.dtype == DType::kF64 ? flops_f64 : spec.dtype == DType::kF32 ? flops_f32 : flops;
  return measure::cost_of(spec, measure::Pass::kForwardBackward).flops <= most && spec.input_bytes(true) + spec.output_bytes(true) <= bytes;
}

ShapeLimit limit_of(double seconds, double peak, double peak_f32, int64_t memory_bytes) {
  constexpr double kShareOfPeak = 0.4, kReference = 1e9;
  ShapeLimit limit;
  limit.flops = seconds * kShareOfPeak * peak;
  limit.flops_f32 = seconds * kShareOfPeak * peak_f32;
  limit.flops_f64 = seconds * kReference;
  limit.bytes = memory_bytes / 4;
  return limit;
}

int64_t Shapes::log_uniform(int64_t least, int64_t most) {
  const double from = static_cast<double>(least), to = static_cast<double>(most + 1);
  return std::clamp(static_cast<int64_t>(from * std::pow(to / from, uniform())), least, most);
}

ProblemSpec Shapes::any() {
  constexpr int64_t kMostKeys = 16384, kMostQueriesOfDecode = 8;
  ProblemSpec s;
  s.batch = log_uniform(1, 32);
  s.seqlen_q = s.seqlen_k = log_uniform(1, kMostKeys);
  if (uniform() < range_.decode) s.seqlen_q = uniform() < 0.7 ? 1 : log_uniform(2, kMostQueriesOfDecode);
  s.nheads = log_uniform(1, 64);
  std::vector<int64_t> divisors;
  for (int64_t n = 1; n <= s.nheads; ++n)
    if (s.nheads % n == 0) divisors.push_back(n);
  const bool grouped = uniform() < 0.5;
  const int64_t divisor = divisors[generator_() % divisors.size()];
  s.nheads_k = grouped ? divisor : s.nheads;
  const int64_t headdim = 8 * log_uniform(4, 32);
  s.headdim = range_.headdims.empty() ? headdim : range_.headdims[generator_() % range_.headdims.size()];
  s.headdim_v = s.headdim;
  s.causal = uniform() < 0.5;
  s.dtype = range_.dtypes[generator_() % range_.dtypes.size()];
  return s;
}

ProblemSpec Shapes::within(const ShapeLimit& limit) {
  for (;;)
    if (const ProblemSpec spec = any(); limit.admits(spec)) return spec;
}

}  // namespace fattn::lab
