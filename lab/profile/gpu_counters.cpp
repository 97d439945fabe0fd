#include "lab/profile/gpu_counters.h"

#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <stdexcept>

namespace fattn::lab::profile {
namespace {

constexpr const char* kSource = "CUPTI Range Profiler";
constexpr int kMostPasses = 400;

// A step of the profiler that failed: the reason of every counter.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The primary context, in which the library computes.
class Context {
 public:
  Context(const std::string& driver, int device) {
    void* const library = dlopen(driver.empty() ? "libcuda.so.1" : driver.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (!library) throw Refused("the CUDA driver is not loaded");
    const auto find = [&](auto& function, const char* symbol) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, symbol));
      if (!function) throw Refused(std::string("the CUDA driver has no ") + symbol);
    };
    int (*retain)(void**, int) = nullptr;
    int (*find_device)(int*, int) = nullptr;
    find(find_device, "cuDeviceGet");
    find(retain, "cuDevicePrimaryCtxRetain");
    find(push_, "cuCtxPushCurrent_v2");
    find(pop_, "cuCtxPopCurrent_v2");
    release_ = reinterpret_cast<decltype(release_)>(dlsym(library, "cuDevicePrimaryCtxRelease_v2"));
    if (find_device(&device_, device) != 0 || retain(&context_, device_) != 0) throw Refused("the device's context cannot be had");
    push_(context_);
  }
  ~Context() {
    void* popped = nullptr;
    pop_(&popped);
    if (release_) release_(device_);
  }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  void* get() const { return context_; }

 private:
  int (*push_)(void*) = nullptr;
  int (*pop_)(void**) = nullptr;
  int (*release_)(int) = nullptr;
  int device_ = 0;
  void* context_ = nullptr;
};

// Versions say in different ways that they know parameters of another size.
template <class Parameters>
int with_either_size(Parameters& parameters, int (*function)(Parameters*)) {
  constexpr int kInvalidParameter = 1, kSizeNotSufficient = 10;
  int result = function(&parameters);
  if (result == kInvalidParameter || result == kSizeNotSufficient) {
    parameters.size = sizeof(Parameters);
    result = function(&parameters);
  }
  return result;
}

class Session {
 public:
  Session(const Cupti& cupti, void* context, int device) : cupti_(cupti) {
    if (!cupti.no_counters.empty()) throw Refused(cupti.no_counters);
    cupti::Initialize initialize;
    must("cuptiProfilerInitialize", cupti.profilerInitialize(&initialize));
    initialized_ = true;
    try {
      cupti::ChipName chip;
      chip.device = static_cast<size_t>(device);
      must("cuptiDeviceGetChipName", cupti.deviceGetChipName(&chip));
      cupti::Availability availability;
      availability.context = context;
      must("cuptiProfilerGetCounterAvailability", cupti.profilerGetCounterAvailability(&availability));
      availability_.resize(availability.bytes);
      availability.image = availability_.data();
      must("cuptiProfilerGetCounterAvailability", cupti.profilerGetCounterAvailability(&availability));
      cupti::HostInitialize host;
      host.chip = chip.name;
      host.availability = availability_.data();
      must("cuptiProfilerHostInitialize", with_either_size(host, cupti.profilerHostInitialize));
      host_ = host.host;
      cupti::Enable enable;
      enable.context = context;
      must("cuptiRangeProfilerEnable", cupti.rangeProfilerEnable(&enable));
      profiler_ = enable.profiler;
    } catch (...) {
      close();
      throw;
    }
  }
  ~Session() { close(); }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  bool knows(const char* metric) const {
    cupti::MetricProperties properties;
    properties.host = host_;
    properties.metric = metric;
    return with_either_size(properties, cupti_.profilerHostGetMetricProperties) == 0;
  }

  std::vector<double> count(std::vector<const char*> metrics, const std::function<void()>& run) {
    cupti::AddMetrics add;
    add.host = host_, add.metrics = metrics.data(), add.count = metrics.size();
    must("cuptiProfilerHostConfigAddMetrics", cupti_.profilerHostConfigAddMetrics(&add));
    cupti::ConfigImageSize config_size;
    config_size.host = host_;
    must("cuptiProfilerHostGetConfigImageSize", cupti_.profilerHostGetConfigImageSize(&config_size));
    std::vector<uint8_t> config(config_size.bytes);
    cupti::ConfigImage image;
    image.host = host_, image.bytes = config.size(), image.image = config.data();
    must("cuptiProfilerHostGetConfigImage", cupti_.profilerHostGetConfigImage(&image));
    cupti::DataSize data_size;
    data_size.profiler = profiler_, data_size.metrics = metrics.data(), data_size.count = metrics.size();
    data_size.ranges = 1, data_size.nodes = 1;
    must("cuptiRangeProfilerGetCounterDataSize", cupti_.rangeProfilerGetCounterDataSize(&data_size));
    std::vector<uint8_t> data(data_size.bytes);
    cupti::DataInitialize begin;
    begin.profiler = profiler_, begin.bytes = data.size(), begin.data = data.data();
    must("cuptiRangeProfilerCounterDataImageInitialize", cupti_.rangeProfilerCounterDataImageInitialize(&begin));
    cupti::SetConfig set;
    set.profiler = profiler_, set.config = config.data(), set.config_bytes = config.size(), set.data = data.data(), set.data_bytes = data.size();
    must("cuptiRangeProfilerSetConfig", cupti_.rangeProfilerSetConfig(&set));
    run_passes(run);
    cupti::Decode decode;
    decode.profiler = profiler_;
    must("cuptiRangeProfilerDecodeData", cupti_.rangeProfilerDecodeData(&decode));
    std::vector<double> values(metrics.size(), NAN);
    cupti::Evaluate evaluate;
    evaluate.host = host_, evaluate.data = data.data(), evaluate.data_bytes = data.size();
    evaluate.metrics = metrics.data(), evaluate.count = metrics.size(), evaluate.values = values.data();
    must("cuptiProfilerHostEvaluateToGpuValues", cupti_.profilerHostEvaluateToGpuValues(&evaluate));
    return values;
  }

 private:
  void must(const char* what, int result) const {
    if (result != 0) throw Refused(cupti_.words(what, result));
  }

  void run_passes(const std::function<void()>& run) {
    cupti::Profiler profiler;
    profiler.profiler = profiler_;
    for (int pass = 0; pass < kMostPasses; ++pass) {
      must("cuptiRangeProfilerStart", cupti_.rangeProfilerStart(&profiler));
      cupti::PushRange push;
      push.profiler = profiler_, push.name = "call";
      must("cuptiRangeProfilerPushRange", cupti_.rangeProfilerPushRange(&push));
      run();
      must("cuptiRangeProfilerPopRange", cupti_.rangeProfilerPopRange(&profiler));
      cupti::Stop stop;
      stop.profiler = profiler_;
      must("cuptiRangeProfilerStop", cupti_.rangeProfilerStop(&stop));
      if (stop.all_passes) return;
    }
    throw Refused("the counters were not done after " + std::to_string(kMostPasses) + " passes");
  }

  void close() noexcept {
    if (profiler_) {
      cupti::Profiler disable;
      disable.profiler = profiler_;
      cupti_.rangeProfilerDisable(&disable);
    }
    if (host_) {
      cupti::HostDeinitialize host;
      host.host = host_;
      cupti_.profilerHostDeinitialize(&host);
    }
    if (initialized_) {
      cupti::Initialize end;
      cupti_.profilerDeInitialize(&end);
    }
    profiler_ = host_ = nullptr;
    initialized_ = false;
  }

  const Cupti& cupti_;
  bool initialized_ = false;
  std::vector<uint8_t> availability_;
  void *host_ = nullptr, *profiler_ = nullptr;
};

Counter* counter_of(std::vector<Counter>& counters, const std::string& name) {
  for (Counter& counter : counters)
    if (counter.name == name) return &counter;
  return nullptr;
}

// What is added up, and what of it goes to other multiprocessors' shared memory and not to the L2 cache.
void add_sum(std::vector<Counter>& counters, const char* name, const char* words, const std::vector<const char*>& parts,
             const std::vector<const char*>& without) {
  Counter sum{name, "B", words, 0.0, "", kSource, {}, ""};
  for (const char* part : parts) {
    const Counter* const counter = counter_of(counters, part);
    if (!counter || !counter->value) {
      sum.value.reset();
      sum.reason = counter ? counter->reason : "no such counter";
      break;
    }
    *sum.value += *counter->value;
  }
  for (const char* part : without)  // chips without clusters have none
    if (const Counter* const counter = counter_of(counters, part); counter && counter->value && sum.value) *sum.value -= *counter->value;
  counters.push_back(std::move(sum));
}

}  // namespace

const std::vector<GpuMetric>& gpu_metrics() {
  constexpr double kPercent = 0.01;
  constexpr double kWavefront = 128;  // bytes that shared memory's banks give at once
  static const std::vector<GpuMetric> all = {
      {"gpu_time", "s", "from the first kernel's begin to the last one's end, at the profiler's clocks", "gpu__time_duration.sum", 1e-9},
      {"dram_read_bytes", "B", "read from the GPU's memory", "dram__bytes_read.sum", 1},
      {"dram_write_bytes", "B", "written to the GPU's memory", "dram__bytes_write.sum", 1},
      {"l2_read_bytes", "B", "that multiprocessors got through the crossbar", "l1tex__m_xbar2l1tex_read_bytes.sum", 1},
      {"l2_write_bytes", "B", "that multiprocessors sent through the crossbar", "l1tex__m_l1tex2xbar_write_bytes.sum", 1},
      {"cluster_read_bytes", "B", "of these from other multiprocessors' shared memory", "l1tex__m_xbar2l1tex_read_bytes_mem_dshared.sum", 1},
      {"cluster_write_bytes", "B", "of these to other multiprocessors' shared memory", "l1tex__m_l1tex2xbar_write_bytes_mem_dshared.sum", 1},
      {"l2_hit_share", "share", "sectors that the L2 cache held", "lts__t_sector_hit_rate.pct", kPercent},
      {"dram_share", "share", "of what the GPU's memory can do", "dram__throughput.avg.pct_of_peak_sustained_elapsed", kPercent},
      {"l2_share", "share", "of what the L2 cache can do", "lts__throughput.avg.pct_of_peak_sustained_elapsed", kPercent},
      {"sm_share", "share", "of what a multiprocessor's busiest part can do", "sm__throughput.avg.pct_of_peak_sustained_elapsed", kPercent},
      {"tensor_share", "share", "of the time that matrix units were at work", "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
       kPercent},
      {"fma_share", "share", "of the fp32 multiply-adds that could be issued", "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_elapsed",
       kPercent},
      {"exp_share", "share", "of the exponentials and the like that could be issued", "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed",
       kPercent},
      {"occupancy", "share", "warps there are, of the most that a multiprocessor holds", "sm__warps_active.avg.pct_of_peak_sustained_active",
       kPercent},
      {"shared_bytes", "B", "that shared memory's banks moved, 128 bytes each time", "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum", kWavefront},
      {"stall_memory", "", "warps that wait for memory or L2, of each that issues",
       "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio", 1},
      {"stall_shared", "", "warps that wait for shared memory or exponentials",
       "smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio", 1},
      {"stall_barrier", "", "warps that wait at a barrier", "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio", 1},
      {"stall_matrix", "", "warps that wait for a product of a warpgroup", "smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio", 1},
      {"stall_math", "", "warps that wait for a busy pipe", "smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active.ratio", 1},
      {"stall_wait", "", "warps that wait a fixed time for the instruction before", "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio",
       1},
      {"stall_sleeping", "", "warps that sleep", "smsp__average_warps_issue_stalled_sleeping_per_issue_active.ratio", 1},
  };
  return all;
}

std::vector<Counter> count_on_gpu(const Cupti& cupti, int device, const std::string& driver, const std::function<void()>& run) {
  std::vector<Counter> counters;
  for (const GpuMetric& m : gpu_metrics())
    counters.push_back({m.name, m.unit, std::string(m.words) + " (" + m.metric + ")", {}, "", kSource, {}, ""});
  try {
    if (!cupti) throw Refused(cupti.reason);
    const Context context(driver, device);
    Session session(cupti, context.get(), device);
    std::vector<const char*> wanted;
    std::vector<size_t> places;
    for (size_t i = 0; i < counters.size(); ++i) {
      if (!session.knows(gpu_metrics()[i].metric)) {
        counters[i].reason = "this chip has no such counter";
        continue;
      }
      wanted.push_back(gpu_metrics()[i].metric);
      places.push_back(i);
    }
    const std::vector<double> values = session.count(wanted, run);
    for (size_t i = 0; i < values.size(); ++i) {
      Counter& counter = counters[places[i]];
      if (std::isfinite(values[i]))
        counter.value = values[i] * gpu_metrics()[places[i]].factor;
      else
        counter.reason = "the profiler gave no number for it";
    }
  } catch (const std::exception& error) {
    for (Counter& counter : counters)
      if (!counter.value && counter.reason.empty()) counter.reason = error.what();
  }
  add_sum(counters, "dram_bytes", "read from and written to the GPU's memory", {"dram_read_bytes", "dram_write_bytes"}, {});
  add_sum(counters, "l2_bytes", "between multiprocessors and the L2 cache", {"l2_read_bytes", "l2_write_bytes"},
          {"cluster_read_bytes", "cluster_write_bytes"});
  return counters;
}

}  // namespace fattn::lab::profile
