// Every quantity is sampled once a round, and there are several rounds: what disturbs the machine for a second spoils one sample of each, which the
// median leaves out.
#include "lab/calibrate.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <utility>

#include "fattn/device.hpp"
#include "fattn/plan.hpp"
#include "fattn/system.hpp"
#include "lab/ceiling.h"
#include "lab/fit_kernels.h"
#include "measure/environment.h"
#include "measure/library_plans.h"
#include "measure/memory.h"
#include "measure/peak_kernels.h"
#include "measure/problem.h"
#include "measure/rate_kernels.h"
#include "measure/statistics.h"
#include "measure/together.h"

namespace fattn::lab {
namespace {

using Clock = std::chrono::steady_clock;
using Sample = std::function<double()>;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// What is measured, and how; without a sample it cannot be, and `reason` says why.
struct Task {
  std::string name;
  Sample sample;
  std::string reason;
};

// Times are medians as rates are, but a sample that is not above 0 says nothing.
Measured summarized(const Task& task, const std::vector<double>& samples) {
  Measured m;
  if (samples.empty()) {
    m.reason = task.reason;
    return m;
  }
  const measure::Statistics s = measure::summarize(samples);
  m.value = s.median, m.low = s.min, m.high = s.max, m.samples = static_cast<int>(s.samples);
  return m;
}

// A loop that is run so often that a sample takes `seconds`, on `threads` threads at once; `work`: of an iteration.
Sample loop_rate(std::function<void(int thread, int64_t iterations)> run, double work, int threads, double seconds) {
  auto iterations = std::make_shared<int64_t>(0);
  return [run = std::move(run), work, threads, seconds, iterations] {
    const auto rate = [&] { return measure::rate_together(threads, work * static_cast<double>(*iterations), [&](int t) { run(t, *iterations); }); };
    if (*iterations == 0)
      for (*iterations = 1;; *iterations *= 4) {
        const double each = threads * work / rate();  // seconds of an iteration of one thread
        const double taken = each * static_cast<double>(*iterations);
        if (taken < 0.2 * seconds) continue;
        *iterations = std::max<int64_t>(1, static_cast<int64_t>(seconds / each));
        break;
      }
    return rate();
  };
}

constexpr int64_t kKiB = 1024, kMiB = 1024 * 1024;

// The memory of all threads: each writes and reads its own part.
struct Parts {
  size_t bytes;  // of a thread, a multiple of two pages
  measure::Pages pages;

  static size_t bytes_a_thread(const fattn_cpu_info& cpu, int threads) {
    int64_t all = std::clamp<int64_t>(2 * cpu.l3_bytes, 256 * kMiB, 512 * kMiB);
    if (cpu.memory_available_bytes > 0) all = std::min(all, cpu.memory_available_bytes / 4);
    return static_cast<size_t>(std::max<int64_t>(all / threads / (8 * kKiB), 1) * 8 * kKiB);
  }
  Parts(const fattn_cpu_info& cpu, int threads) : bytes(bytes_a_thread(cpu, threads)), pages(bytes * static_cast<size_t>(threads)) {
    measure::rate_together(threads, 1, [&](int t) { std::memset(part(t), t + 1, bytes); });
  }
  char* part(int thread) const { return static_cast<char*>(pages.data()) + static_cast<size_t>(thread) * bytes; }
};

// Half of a cache, so that what else is in it does not matter; of the L3 cache, which threads share, twice a core's L2 cache at least, or reads would
// come from there. 0, and why: there is no size that only this level has.
size_t working_set(const fattn_cpu_info& cpu, const std::string& level, int threads, const Parts& parts, std::string& reason) {
  const auto whole = [](int64_t bytes) { return static_cast<size_t>(bytes / (8 * kKiB) * (8 * kKiB)); };
  if (level == "dram") return whole(static_cast<int64_t>(parts.pages.size()) / threads);
  const int64_t size = level == "l1" ? cpu.l1d_bytes : level == "l2" ? cpu.l2_bytes : cpu.l3_bytes;
  if (size <= 0) {
    reason = fmt::format("the system does not say how large the {} cache is", level == "l1" ? "L1" : level == "l2" ? "L2" : "L3");
    return 0;
  }
  if (level != "l3") return std::min(std::max<size_t>(whole(size / 2), 8 * kKiB), parts.bytes);
  const int64_t share = std::max(size / 4 / threads, 2 * cpu.l2_bytes);
  if (share * threads > size * 3 / 4 || whole(share) > parts.bytes) {
    reason = fmt::format("{} threads' parts of the L3 cache are no larger than their L2 caches", threads);
    return 0;
  }
  return whole(share);
}

void add_memory(std::vector<Task>& tasks, const std::shared_ptr<const Parts>& parts, const fattn_cpu_info& cpu, int threads,
                const std::string& behind, double seconds) {
  const measure::MemoryKernel kernel = measure::memory_kernel(static_cast<Isa>(cpu.isa_default));
  for (const char* level : {"l1", "l2", "l3", "dram"}) {
    std::string reason;
    const size_t bytes = working_set(cpu, level, threads, *parts, reason), half = bytes / 2;
    const auto name = [&](const char* what) { return fmt::format("{}_{}_bytes_per_s{}", level, what, behind); };
    Task read{name("read"), {}, reason}, copy{name("copy"), {}, reason};
    if (bytes > 0) {
      read.sample =
          loop_rate([=](int t, int64_t rounds) { kernel.read(parts->part(t), bytes, rounds); }, static_cast<double>(bytes), threads, seconds);
      copy.sample = loop_rate([=](int t, int64_t rounds) { kernel.copy(parts->part(t) + half, parts->part(t), half, rounds); },
                              static_cast<double>(bytes), threads, seconds);
    }
    tasks.push_back(std::move(read));
    tasks.push_back(std::move(copy));
  }
}

void add_arithmetic(std::vector<Task>& tasks, Isa isa, int threads, const std::string& behind, double seconds) {
  const measure::PeakKernel fma = measure::fma_kernel(isa), bf16 = measure::bf16_kernel(isa);
  const auto peak = [&](const measure::PeakKernel& kernel) {
    return loop_rate([run = kernel.run](int, int64_t n) { run(n * 100); }, 100 * kernel.flops_per_iteration, threads, seconds);
  };
  tasks.push_back({"fma_flops_per_s" + behind, peak(fma), ""});
  tasks.push_back({"bf16_flops_per_s" + behind, bf16 ? peak(bf16) : Sample(),
                   fmt::format("instruction set {} has no bf16 products; bf16 is computed in fp32", name_of(isa))});
  const measure::ExpKernel exp = measure::exp_kernel(isa);
  tasks.push_back(
      {"exp_per_s" + behind, loop_rate([run = exp.run](int, int64_t n) { run(n * 100); }, 100 * exp.per_iteration, threads, seconds), ""});
}

// A forward call of the library with next to nothing to do, by the clock on the wall: `batch` queries of one head with a key each.
class SmallCall {
 public:
  SmallCall(int64_t batch, int threads) {
    spec_.batch = batch, spec_.seqlen_q = spec_.seqlen_k = 1, spec_.nheads = spec_.nheads_k = 1, spec_.headdim = spec_.headdim_v = 32;
    Options options;
    options.num_threads = threads;
    plan_ = std::make_shared<const Plan>(measure::forward_tensors(spec_, {}), options);
    const auto floats = static_cast<size_t>(batch) * 32;
    for (std::vector<float>* tensor : {&q_, &k_, &v_, &o_, &lse_}) tensor->assign(floats, 1.0F);
    workspace_ = std::make_unique<measure::Pages>(plan_->workspace_bytes());
  }
  // The quickest of some batches: where processors are shared, others run in most of them.
  double seconds() {
    measure::Addresses at;
    at.q = q_.data(), at.k = k_.data(), at.v = v_.data(), at.o = o_.data(), at.lse = lse_.data();
    const ForwardTensors tensors = measure::forward_tensors(spec_, {}, at);
    const auto run = [&] { plan_->execute(tensors, workspace_->data(), workspace_->size()); };
    double least = 0;
    for (int batch = 0; batch < kBatches; ++batch) {
      const Clock::time_point start = Clock::now();
      for (int i = 0; i < kCalls; ++i) run();
      const double each = seconds_since(start) / kCalls;
      least = batch == 0 ? each : std::min(least, each);
    }
    return least;
  }

 private:
  static constexpr int kBatches = 40, kCalls = 25;
  measure::ProblemSpec spec_;
  std::shared_ptr<const Plan> plan_;
  std::vector<float> q_, k_, v_, o_, lse_;
  std::unique_ptr<measure::Pages> workspace_;
};

void add_calls(std::vector<Task>& tasks, int threads) {
  tasks.push_back({"call_s", [call = std::make_shared<SmallCall>(1, 1)] { return call->seconds(); }, ""});
  Task fork{"fork_join_s", {}, "there is one thread only"};
  if (threads > 1) {
    // The work itself is taken off: a thread's share of what one thread takes for all of it.
    const int64_t tasks_of_call = std::max<int64_t>(64, 2 * threads);
    fork.reason = "too small to be told from the work itself";
    fork.sample = [alone = std::make_shared<SmallCall>(tasks_of_call, 1), all = std::make_shared<SmallCall>(tasks_of_call, threads), threads] {
      return all->seconds() - alone->seconds() / threads;
    };
  }
  tasks.push_back(std::move(fork));
}

// What the system takes to hand out pages, which is done at the first write to each.
double fresh_memory_rate() {
  const measure::Pages pages(32 * kMiB);
  return measure::rate_together(1, static_cast<double>(pages.size()), [&](int) {
    for (size_t at = 0; at < pages.size(); at += 4 * kKiB) static_cast<volatile char*>(pages.data())[at] = 1;
  });
}

std::vector<Task> cpu_tasks(const CalibrateOptions& options, Calibration& c) {
  const fattn_cpu_info cpu = cpu_info();
  const int threads = std::max(1, cpu.usable_threads);
  c.facts = {{"threads", threads},
             {"logical_cpus", cpu.logical_cpus},
             {"l1d_bytes", static_cast<double>(cpu.l1d_bytes)},
             {"l2_bytes", static_cast<double>(cpu.l2_bytes)},
             {"l3_bytes", static_cast<double>(cpu.l3_bytes)},
             {"memory_bytes", static_cast<double>(cpu.memory_bytes)}};
  const auto parts = std::make_shared<const Parts>(cpu, threads);
  std::vector<Task> tasks;
  for (const bool all : {true, false}) {
    const std::string behind = all ? "" : "_one_thread";
    add_arithmetic(tasks, static_cast<Isa>(cpu.isa_default), all ? threads : 1, behind, options.sample_seconds);
    add_memory(tasks, parts, cpu, all ? threads : 1, behind, options.sample_seconds);
  }
  tasks.push_back({"fresh_memory_bytes_per_s", fresh_memory_rate, ""});
  add_calls(tasks, threads);
  return tasks;
}

std::vector<Task> cuda_tasks(const CalibrateOptions& options, Calibration& c) {
  const int device = options.device.size() > 5 ? std::stoi(options.device.substr(5)) : 0;
  const fattn_cuda_info gpu = cuda::info(device);
  c.facts = {{"multiprocessors", gpu.multiprocessors},         {"shared_per_multiprocessor_bytes", gpu.shared_per_multiprocessor},
             {"shared_per_block_bytes", gpu.shared_per_block}, {"registers_per_multiprocessor", gpu.registers_per_multiprocessor},
             {"l2_bytes", static_cast<double>(gpu.l2_bytes)},  {"memory_bytes", static_cast<double>(gpu.memory_bytes)}};
  const auto rate = [device](int32_t what) { return [device, what] { return cuda::peak(device, what); }; };
  const auto time = [device](int32_t what) { return [device, what] { return 1 / cuda::peak(device, what); }; };
  return {{"matrix_flops_per_s", rate(FATTN_PEAK_MATRIX), ""},
          {"fma_flops_per_s", rate(FATTN_PEAK_FMA), ""},
          {"exp_per_s", rate(FATTN_PEAK_EXP), ""},
          {"shared_read_bytes_per_s", rate(FATTN_PEAK_SHARED), ""},
          {"l2_read_bytes_per_s", rate(FATTN_PEAK_L2), ""},
          {"dram_read_bytes_per_s", rate(FATTN_PEAK_READ), ""},
          {"dram_copy_bytes_per_s", rate(FATTN_PEAK_COPY), ""},
          {"launch_s", time(FATTN_PEAK_LAUNCH), ""},
          {"round_trip_s", time(FATTN_PEAK_ROUND_TRIP), ""}};
}

}  // namespace

Calibration calibrate(const CalibrateOptions& options) {
  const Clock::time_point start = Clock::now();
  Calibration c;
  c.device = options.device == "cpu" ? "cpu" : "cuda";
  c.machine = identity_of(options.device);
  c.environment = measure::environment();
  std::vector<Task> tasks = c.on_cuda() ? cuda_tasks(options, c) : cpu_tasks(options, c);
  const int total = static_cast<int>(tasks.size()) * options.samples;
  int done = 0;
  std::map<std::string, std::vector<double>> samples;
  for (int round = 0; round < options.samples; ++round)
    for (Task& task : tasks) {
      if (options.progress) options.progress(done, total, task.name);
      ++done;
      if (!task.sample) continue;
      try {
        if (const double sample = task.sample(); sample > 0) samples[task.name].push_back(sample);
      } catch (const Error& error) {  // this one cannot be measured here; the others may
        task.sample = nullptr;
        task.reason = error.what();
        samples.erase(task.name);
      }
    }
  if (options.progress) options.progress(total, total, "");
  for (const Task& task : tasks) c.measured[task.name] = summarized(task, samples[task.name]);
  if (options.kernel_seconds > 0) {
    FitOptions kernels;
    if (c.on_cuda()) kernels.place = {Device::kCuda, options.device.size() > 5 ? std::stoi(options.device.substr(5)) : 0, true};
    kernels.peak = c.of(c.on_cuda() ? "matrix_flops_per_s" : "fma_flops_per_s");
    kernels.peak_f32 = c.on_cuda() ? std::max(c.of("fma_flops_per_s"), kernels.peak / 3) : kernels.peak;
    if (c.on_cuda()) {
      const double count = std::max(1.0, c.fact("multiprocessors"));
      kernels.flops_of_worker = kernels.peak / count;
      kernels.f32_flops_of_worker = kernels.peak_f32 / count;
      kernels.memory_bytes_per_s = c.of("dram_read_bytes_per_s");
    } else {
      kernels.flops_of_worker = kernels.f32_flops_of_worker = c.of("fma_flops_per_s_one_thread");
      kernels.bf16_flops_of_worker = c.of("bf16_flops_per_s_one_thread");
      kernels.near_bytes_per_s = c.of("l3_read_bytes_per_s_one_thread");
      kernels.memory_bytes_per_s = c.of("dram_read_bytes_per_s");
    }
    CeilingRates rates = ceiling_rates(c, 0, kernels.place.flush_l2);
    const bool products = !c.on_cuda() && c.of("bf16_flops_per_s") > 0;
    kernels.accounted = [&, rates, products](const measure::ProblemSpec& spec, measure::Pass pass, double seconds) mutable {
      if (spec.dtype == DType::kF64) return 0.0;
      rates.flops_per_s = spec.dtype == DType::kF32                ? kernels.peak_f32
                          : products && spec.dtype == DType::kBF16 ? c.of("bf16_flops_per_s")
                                                                   : kernels.peak;
      return ceiling_of(spec, pass, rates, c.on_cuda()).sum() / seconds;
    };
    kernels.seconds = options.kernel_seconds;
    kernels.compile = options.compile;
    kernels.progress = options.kernel_progress;
    c.kernels = fit_kernels(kernels);
  }
  c.seconds = seconds_since(start);
  return c;
}

}  // namespace fattn::lab
