// The fitting set has calls of all sizes up to some tens of milliseconds: what a call, a task, a row, a product and a byte take shows in different
// ones.
#include "lab/fit_kernels.h"

#include <algorithm>
#include <chrono>

#include "fattn/device.hpp"
#include "fattn/system.hpp"
#include "lab/call_timer.h"

namespace fattn::lab {
namespace {

using Clock = std::chrono::steady_clock;
using measure::Pass;
using measure::ProblemSpec;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

constexpr double kShort = 0.03, kLong = 0.15;  // seconds of forward and backward that shapes are admitted up to, by limit_of()
constexpr int kLongOfEvery = 8;                // so many shapes are up to kLong

using Samples = std::map<std::string, std::vector<TimedWork>>;

// The quickest quarter says what the machine takes when nothing disturbs it.
double lower_quartile(std::vector<double> seconds) {
  const size_t at = (seconds.size() - 1) / 4;
  std::nth_element(seconds.begin(), seconds.begin() + static_cast<std::ptrdiff_t>(at), seconds.end());
  return seconds[at];
}

class Measuring {
 public:
  Measuring(const FitOptions& options, Samples& samples) : options_(options), samples_(samples), sizes_(machine_sizes(options.place)) {}

  void one(const ProblemSpec& spec, const Options& library) {
    try {
      CallTimer timer(library, options_.place);
      timer.prepare(spec, true);
      for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
        const PlanShape shape = plan_shape(spec, pass, library, options_.place);
        TimedWork timed{work_of(spec, shape, sizes_), lower_quartile(timer.time(pass, {}))};
        if (options_.accounted && library.algorithm == Algorithm::kAuto)
          if (const double share = options_.accounted(spec, pass, timed.seconds); share > 0) shares_.push_back(share);
        std::vector<TimedWork>& family = samples_[timed.work.family];
        family.push_back(std::move(timed));
      }
    } catch (const std::exception&) {  // no kernel here computes it; its family has no constants then
    }
  }
  // What one call in a hundred reaches: the very best is a matter of luck, and most are small, or disturbed where the machine is not quiet.
  void take_reach(KernelTimes& times) {
    constexpr size_t kFew = 20;
    if (shares_.size() < kFew) return;
    const size_t at = shares_.size() - 1 - shares_.size() / 100;
    std::nth_element(shares_.begin(), shares_.begin() + static_cast<std::ptrdiff_t>(at), shares_.end());
    times.reach = std::min(shares_[at], 1.0);
    times.reach_calls = static_cast<int>(shares_.size());
  }

 private:
  const FitOptions& options_;
  Samples& samples_;
  const MachineSizes sizes_;
  std::vector<double> shares_;
};

int64_t memory_for_tensors(const measure::Placement& place) {
  const int64_t host = cpu_info().memory_available_bytes;
  constexpr int64_t kEnough = int64_t{2} << 30;
  if (place.device == Device::kCpu) return std::min(host, kEnough);
  return std::min<int64_t>({host, static_cast<int64_t>(cuda::memory(place.index).free_bytes), kEnough});
}

// A GPU has kernels, and so constants, of its own for every width of a head, with and without a mask, in 16 bits and in fp32: calls of each in turn,
// so that all have some whatever the time. fp32 has two algorithms. bf16 and fp16 share their constants, and few head sizes have few kernels to
// compile.
std::vector<ProblemSpec> fitting_set_of_gpu(uint64_t seed, const ShapeLimit& of_short, const ShapeLimit& of_long) {
  constexpr int kRounds = 24, kOfFp32 = 2, kOfDecode = 4;
  const std::vector<std::vector<int64_t>> widths = {{40, 64}, {80, 96}, {104, 128}, {160, 192}, {224, 256}};
  ShapeRange range;
  range.decode = 1;
  range.dtypes = {DType::kBF16, DType::kBF16, DType::kF32};
  range.headdims = {64, 96, 128, 256};
  Shapes decode(seed, range);
  range.decode = 0;
  std::vector<std::vector<Shapes>> of_dtype;
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    range.dtypes = {dtype};
    std::vector<Shapes>& of_width = of_dtype.emplace_back();
    for (const std::vector<int64_t>& width : widths) {
      range.headdims = width;
      of_width.emplace_back(++seed, range);
    }
  }
  std::vector<ProblemSpec> specs;
  for (int round = 0; round < kRounds; ++round) {
    const ShapeLimit& limit = round % (kLongOfEvery / 2) == 0 ? of_long : of_short;
    for (int turn = 0; turn < 1 + kOfFp32; ++turn)
      for (Shapes& shapes : of_dtype[turn == 0 ? 0 : 1])
        for (const bool causal : {false, true}) {
          specs.push_back(shapes.within(limit));
          specs.back().causal = causal;
        }
    for (int i = 0; i < kOfDecode; ++i) specs.push_back(decode.within(limit));
  }
  return specs;
}

// Products at four fifths of the peak, bytes at the rate of memory.
std::map<std::string, double> expected_of(const std::string& family, const FitOptions& o) {
  constexpr double kShareOfPeak = 0.8;
  const auto has = [&](const char* part) { return family.find(part) != std::string::npos; };
  std::map<std::string, double> expected;
  if (has("reference")) return expected;
  const double rate = has("bf16 ") && o.bf16_flops_of_worker > 0 ? o.bf16_flops_of_worker : has("fp32") ? o.f32_flops_of_worker : o.flops_of_worker;
  const bool of_worker = !has("decode") && !(has("cuda") && has("standard"));  // cuBLASLt's are of the whole device
  if (rate > 0 && of_worker) expected["products"] = 2 / (kShareOfPeak * rate);
  if (o.near_bytes_per_s > 0) expected["bytes beyond L2"] = 1 / o.near_bytes_per_s;
  if (o.memory_bytes_per_s > 0) expected["bytes beyond L3"] = expected["bytes"] = expected["bytes of keys"] = 1 / o.memory_bytes_per_s;
  return expected;
}

}  // namespace

KernelTimes fit_kernels(const FitOptions& options) {
  const bool cuda = options.place.device == Device::kCuda;
  const int64_t memory = memory_for_tensors(options.place);
  ShapeRange range;
  range.decode = 0.35;
  if (cuda) range.dtypes = {DType::kBF16, DType::kF32};
  Shapes shapes(options.seed, range), standard_shapes(options.seed + 1, range);
  const double scale = cuda ? 0.2 : 1;  // a GPU's calls need not be as long
  const ShapeLimit of_short = limit_of(scale * kShort, options.peak, options.peak_f32, memory),
                   of_long = limit_of(scale * kLong, options.peak, options.peak_f32, memory),
                   of_standard = limit_of(scale * kShort, options.peak, options.peak_f32, memory / 8);
  constexpr size_t kMost = 1500;  // more than there is time for
  std::vector<ProblemSpec> specs;
  if (cuda)
    specs = fitting_set_of_gpu(options.seed + 2, of_short, of_long);
  else
    for (size_t i = 0; i < kMost; ++i) specs.push_back(shapes.within(i % kLongOfEvery == 0 ? of_long : of_short));
  const auto report = [&](double share, const char* what) {
    if (options.progress) options.progress(share, what);
  };
  if (cuda && options.compile) options.compile(specs, [&](double share) { report(0.3 * share, "compiling kernels"); });

  Samples samples;
  Measuring measuring(options, samples);
  const Clock::time_point start = Clock::now();
  Options standard;
  standard.algorithm = Algorithm::kStandard;
  const double begun = cuda ? 0.3 : 0;
  for (size_t i = 0; i < specs.size() && seconds_since(start) < options.seconds; ++i) {
    measuring.one(specs[i], {});
    const size_t standard_of_every = cuda ? 8 : 4;
    if (i % standard_of_every == 0) {
      ProblemSpec spec = standard_shapes.within(of_standard);
      if (spec.dtype == DType::kF64) spec.dtype = DType::kF32;
      constexpr int64_t kMostMatrices = int64_t{1} << 26;  // elements of all heads
      if (spec.seqlen_q * spec.seqlen_k <= kMostMatrices / (spec.batch * spec.nheads)) measuring.one(spec, standard);
    }
    report(begun + (1 - begun) * std::min(1.0, seconds_since(start) / options.seconds), "timing kernels");
  }
  KernelTimes times;
  times.seconds = seconds_since(start);
  measuring.take_reach(times);
  for (const auto& [name, family] : samples)
    if (family.size() >= family.front().work.amounts.size() + 2)
      times.families[name] = fit_family(family, expected_of(name, options));
    else
      times.too_few[name] = static_cast<int>(family.size());
  return times;
}

}  // namespace fattn::lab
