// Peaks of the machine: the best of several short samples with all threads at work.
#include "measure/peaks.h"

#include <algorithm>
#include <vector>

#include "fattn/device.hpp"
#include "fattn/system.hpp"
#include "measure/memory.h"
#include "measure/peak_kernels.h"
#include "measure/together.h"

namespace fattn::measure {
namespace {

constexpr double kSampleSeconds = 0.05, kBriefSampleSeconds = 0.005;
constexpr double kCalibrationPart = 0.2;  // of a sample: how long the run is from which its iterations follow
constexpr int kSamples = 3;

Peak arithmetic_peak(const PeakKernel& kernel, int threads, PeakPains pains) {
  if (!kernel) return {};
  const double sample_seconds = pains == PeakPains::kBrief ? kBriefSampleSeconds : kSampleSeconds;
  Peak peak{kernel.name, 0};
  int64_t iterations = 20000;
  for (int calibrating = 0; calibrating < 20; ++calibrating) {
    const double seconds = 1 / rate_together(1, 1, [&](int) { kernel.run(iterations); });
    if (seconds >= kCalibrationPart * sample_seconds) {
      iterations = static_cast<int64_t>(static_cast<double>(iterations) * sample_seconds / seconds);
      break;
    }
    iterations *= 4;
  }
  for (int i = 0; i < kSamples; ++i)
    peak.rate = std::max(peak.rate,
                         rate_together(threads, static_cast<double>(iterations) * kernel.flops_per_iteration, [&](int) { kernel.run(iterations); }));
  return peak;
}

Isa best_isa(const fattn_cpu_info& cpu) {
  for (Isa isa : {Isa::kAmx, Isa::kAvx512Bf16, Isa::kAvx512, Isa::kAvx2, Isa::kNeon})
    if (available(cpu, isa)) return isa;
  return Isa::kScalar;
}

int64_t sum_of(const int64_t* words, size_t count) {
  typedef int64_t Pair __attribute__((vector_size(16)));
  Pair sums[8] = {};
  const Pair* pairs = reinterpret_cast<const Pair*>(words);
  for (size_t i = 0; i + 8 <= count / 2; i += 8)
    for (size_t j = 0; j < 8; ++j) sums[j] += pairs[i + j];
  int64_t total = 0;
  for (const Pair& sum : sums) total += sum[0] + sum[1];
  return total;
}

}  // namespace

const Peak& Peaks::of(DType dtype) const {
  if (dtype == DType::kF32 && split.rate > fma.rate) return split;
  const bool products = dtype == DType::kBF16 || (dtype == DType::kF16 && device != "cpu");
  return products && bf16.rate > 0 ? bf16 : fma;
}

double Peaks::ceiling(DType dtype) const {
  const double fp32 = std::max({fma.rate, best_fma_rate, dtype == DType::kF32 ? split.rate : 0.0});
  return size_of(dtype) == 2 ? std::max({fp32, bf16.rate, best_bf16_rate}) : fp32;
}

Peaks measure_peaks(Isa isa, int threads, PeakPains pains) {
  Peaks peaks;
  peaks.isa = isa == Isa::kAuto ? static_cast<Isa>(cpu_info().isa_default) : isa;
  peaks.threads = std::max(1, threads);
  peaks.fma = arithmetic_peak(fma_kernel(peaks.isa), peaks.threads, pains);
  peaks.bf16 = arithmetic_peak(bf16_kernel(peaks.isa), peaks.threads, pains);
  const Isa best = best_isa(cpu_info());
  const bool same = peaks.isa == best;
  peaks.best_fma_rate = same ? peaks.fma.rate : arithmetic_peak(fma_kernel(best), peaks.threads, pains).rate;
  peaks.best_bf16_rate = same ? peaks.bf16.rate : arithmetic_peak(bf16_kernel(best), peaks.threads, pains).rate;
  return peaks;
}

Peaks measure_cuda_peaks(int device) {
  const fattn_cuda_info info = cuda::info(device);
  Peaks peaks;
  peaks.device = "cuda:" + std::to_string(device);
  // A peak that cannot be measured (no compiler for its kernel, no memory) is not known; the problem itself may run.
  const auto rate = [&](int32_t what) {
    try {
      return cuda::peak(device, what);
    } catch (const Error& error) {
      if (peaks.problem.find(error.what()) == std::string::npos) peaks.problem += (peaks.problem.empty() ? "" : "; ") + std::string(error.what());
      return 0.0;
    }
  };
  peaks.fma = {"fp32 FMA", rate(FATTN_PEAK_FMA)};
  const int capability = 10 * info.capability_major + info.capability_minor;
  peaks.bf16 = {capability == 90 ? "wgmma, 16 bit" : "mma.sync, 16 bit", rate(FATTN_PEAK_MATRIX)};
  peaks.split = {"three of " + peaks.bf16.name, peaks.bf16.rate / 3};
  peaks.best_fma_rate = peaks.fma.rate;
  peaks.best_bf16_rate = peaks.bf16.rate;
  peaks.read_bytes_per_s = rate(FATTN_PEAK_READ);
  return peaks;
}

Peaks higher(const Peaks& before, const Peaks& after) {
  Peaks best = before;
  best.fma.rate = std::max(before.fma.rate, after.fma.rate);
  best.bf16.rate = std::max(before.bf16.rate, after.bf16.rate);
  best.split.rate = std::max(before.split.rate, after.split.rate);
  best.best_fma_rate = std::max(before.best_fma_rate, after.best_fma_rate);
  best.best_bf16_rate = std::max(before.best_bf16_rate, after.best_bf16_rate);
  best.read_bytes_per_s = std::max(before.read_bytes_per_s, after.read_bytes_per_s);
  return best;
}

double measure_read_bandwidth(int threads, PeakPains pains) {
  const fattn_cpu_info cpu = cpu_info();
  constexpr int64_t kMiB = 1024 * 1024;
  int64_t bytes = pains == PeakPains::kBrief ? 32 * kMiB : std::clamp<int64_t>(2 * cpu.l3_bytes, 256 * kMiB, 512 * kMiB);
  if (cpu.memory_available_bytes > 0) bytes = std::min(bytes, cpu.memory_available_bytes / 4);
  const size_t count = std::max<size_t>(1, static_cast<size_t>(threads));
  const size_t words = static_cast<size_t>(bytes) / sizeof(int64_t) / count / 64 * 64;  // a thread
  if (words == 0) return 0;
  const Pages pages(words * count * sizeof(int64_t));
  int64_t* const all = static_cast<int64_t*>(pages.data());
  const double bytes_a_thread = static_cast<double>(words * sizeof(int64_t));
  // Each thread writes its own part first: pages that were never written are all one page of zeros.
  rate_together(static_cast<int>(count), bytes_a_thread, [&](int t) { std::fill_n(all + static_cast<size_t>(t) * words, words, t + 1); });
  std::vector<int64_t> sums(count);
  double best = 0;
  for (int i = 0; i < kSamples; ++i)
    best = std::max(best, rate_together(static_cast<int>(count), bytes_a_thread,
                                        [&](int t) { sums[static_cast<size_t>(t)] = sum_of(all + static_cast<size_t>(t) * words, words); }));
  const volatile int64_t kept = sums[0];
  (void)kept;
  return best;
}

nlohmann::ordered_json to_json(const Peaks& peaks) {
  using Json = nlohmann::ordered_json;
  const auto known = [](double rate) { return rate > 0 ? Json(rate) : Json(nullptr); };
  return {{"device", peaks.device},
          {"isa", name_of(peaks.isa)},
          {"threads", peaks.threads},
          {"fma_instruction", peaks.fma.name},
          {"fma_flops_per_s", known(peaks.fma.rate)},
          {"bf16_instruction", peaks.bf16.rate > 0 ? Json(peaks.bf16.name) : Json(nullptr)},
          {"bf16_flops_per_s", known(peaks.bf16.rate)},
          {"read_bytes_per_s", known(peaks.read_bytes_per_s)},
          {"problem", peaks.problem.empty() ? Json(nullptr) : Json(peaks.problem)}};
}

}  // namespace fattn::measure
