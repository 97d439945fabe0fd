#include "lab/call_timer.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

namespace fattn::lab {

using measure::Pages;
using measure::Pass;

measure::Inputs repeated_inputs(const measure::ProblemSpec& spec, bool grad) {
  constexpr int64_t kNumbers = 250007;  // no multiple of a row: rows differ
  std::vector<char> block(static_cast<size_t>(kNumbers) * size_of(spec.dtype));
  measure::fill_normal(block.data(), spec.dtype, kNumbers, spec.seed, 0);
  const auto filled = [&](int64_t bytes, size_t from) {
    Pages pages(static_cast<size_t>(bytes));
    auto* const to = static_cast<char*>(pages.data());
    for (size_t at = 0; at < pages.size();) {
      const size_t n = std::min(block.size() - from, pages.size() - at);
      std::memcpy(to + at, block.data() + from, n);
      at += n;
      from = 0;
    }
    return pages;
  };
  const size_t step = block.size() / 5 / 64 * 64;
  measure::Inputs inputs;
  inputs.q = filled(spec.q_bytes(), 0);
  inputs.k = filled(spec.k_bytes(), step);
  inputs.v = filled(spec.v_bytes(), 2 * step);
  if (grad) inputs.dout = filled(spec.o_bytes(), 3 * step);
  return inputs;
}

CallTimer::CallTimer(const Options& library, const measure::Placement& place)
    : contestant_(measure::make_library_contestant(library.algorithm == Algorithm::kStandard ? "standard" : "fattn", library, place)) {}

void CallTimer::prepare(const measure::ProblemSpec& spec, bool grad) {
  contestant_->release();
  contestant_->accept(spec, grad, 0);
  inputs_ = measure::Inputs();  // before others are made
  inputs_ = repeated_inputs(spec, grad);
  contestant_->prepare(spec, inputs_, grad, 0);
}

int64_t CallTimer::extra_bytes(Pass pass) { return contestant_->memory(pass).extra_bytes; }

std::vector<double> CallTimer::time(Pass pass, const TimingOptions& options) {
  constexpr double kLong = 0.2;  // who has run once for so long is warm
  std::vector<double> seconds = contestant_->time(pass, 1, 1);
  const double once = seconds.front();
  if (once < kLong) seconds.clear();
  const double wanted = std::clamp(options.seconds / std::max(once, measure::kMinSampleSeconds), static_cast<double>(options.fewest_samples),
                                   static_cast<double>(options.most_samples));
  const int more = static_cast<int>(wanted) - static_cast<int>(seconds.size());
  if (more > 0)
    for (const double s : contestant_->time(pass, more, 0)) seconds.push_back(s);
  return seconds;
}

}  // namespace fattn::lab
