// Each peak is the best of several short runs of a kernel that does nothing else (kernels/measure).
#include "backend/cuda/peak.h"

#include <algorithm>
#include <chrono>
#include <string>

#include "backend/cuda/kernel_kind.h"
#include "fattn/error.hpp"
#include "jit/kernel_table.h"
#include "plan/architectures.h"
#include "shared/text.h"

namespace fattn::core {
namespace {

constexpr unsigned kThreads = 256;
constexpr int kRuns = 5;
constexpr double kRunSeconds = 5e-3;

struct PeakKey {
  cuda::KernelKind kind = cuda::KernelKind::kPeak;
  int32_t peak = 0, target = 0;
  int32_t reserved[13] = {};
};

PeakKey key_of(CudaPeak peak, int target) {
  PeakKey key;
  key.peak = static_cast<int32_t>(peak);
  key.target = target;
  return key;
}

// The function of kernels/measure, its header and its parameters.
struct PeakSource {
  const char *entry, *header, *parameters;
  std::string call;
};

PeakSource source_of(CudaPeak peak, int target) {
  constexpr const char *kCounted = "float* out, int n", *kPeaks = "peaks.h", *kRates = "rates.h";
  switch (peak) {
    case CudaPeak::kFma: return {"fattn_peak_fma", kPeaks, kCounted, "fma(out, n)"};
    case CudaPeak::kRead: return {"fattn_peak_read", kPeaks, "const uint4* data, long long count, float* out", "read(data, count, out)"};
    case CudaPeak::kMatrix:
      return target == 90 ? PeakSource{"fattn_peak_matrix", "peak_wgmma.h", kCounted, "wgmma(out, n)"}
                          : PeakSource{"fattn_peak_matrix", "peak_mma.h", kCounted, text("mma<", target, ">(out, n)")};
    case CudaPeak::kExp: return {"fattn_peak_exp", kRates, kCounted, "exponentials(out, n)"};
    case CudaPeak::kShared: return {"fattn_peak_shared", kRates, kCounted, "shared_reads(out, n)"};
    case CudaPeak::kL2: return {"fattn_peak_l2", kRates, "const uint4* data, long long count, int n, float* out", "l2_reads(data, count, n, out)"};
    case CudaPeak::kCopy: return {"fattn_peak_copy", kRates, "const uint4* from, uint4* to, long long count", "copy(from, to, count)"};
    case CudaPeak::kLaunch:
    case CudaPeak::kRoundTrip: break;
  }
  return {"fattn_peak_nothing", nullptr, "", ""};
}

jit::Request request_of(const jit::KernelKey& packed) {
  const auto key = jit::pod_of_key<PeakKey>(packed);
  const auto peak = static_cast<CudaPeak>(key.peak);
  const PeakSource source = source_of(peak, key.target);
  jit::Request request;
  request.arch = key.target;
  request.arch_specific = peak == CudaPeak::kMatrix && key.target == 90;
  request.entry = source.entry;
  if (source.header) request.source = text("#include \"kernels/measure/", source.header, "\"\n");
  request.source += text("extern \"C\" __global__ void __launch_bounds__(", kThreads, ") ", source.entry, "(", source.parameters, ") {",
                         source.header ? text(" fattn::peaks::", source.call, "; ") : "", "}\n");
  return request;
}

// What a thread does in an iteration: kernels/measure.
double work_of_thread(CudaPeak peak, int target) {
  if (peak == CudaPeak::kExp) return 32;
  if (peak == CudaPeak::kShared) return 32.0 * 1024 / kThreads;
  if (peak == CudaPeak::kFma) return 32 * 2;
  if (target == 90) return 8 * 2.0 * 64 * 256 * 16 / 128;
  return 16 * 2.0 * 16 * 8 * (target >= 80 ? 16 : 8) / 32;
}

// Seconds of one launch.
class Timer {
 public:
  explicit Timer(CudaDevice& device) : device_(device), driver_(cuda_driver()) {
    device.check(driver_.eventCreate(&begin_, 0), "creating an event");
    device.check(driver_.eventCreate(&end_, 0), "creating an event");
  }
  ~Timer() {
    if (begin_) driver_.eventDestroy(begin_);
    if (end_) driver_.eventDestroy(end_);
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  template <class Launch>
  double seconds(const Launch& launch) {
    device_.check(driver_.eventRecord(begin_, nullptr), "recording an event");
    launch();
    device_.check(driver_.eventRecord(end_, nullptr), "recording an event");
    device_.check(driver_.eventSynchronize(end_), "waiting for a measurement");
    float milliseconds = 0;
    device_.check(driver_.eventElapsedTime(&milliseconds, begin_, end_), "reading events");
    return std::max(1e-9, 1e-3 * static_cast<double>(milliseconds));
  }

 private:
  CudaDevice& device_;
  const CudaDriver& driver_;
  CUevent begin_ = nullptr, end_ = nullptr;
};

class DeviceMemory {
 public:
  DeviceMemory(CudaDevice& device, size_t bytes) : device_(device), address_(device.alloc(bytes)) {}
  ~DeviceMemory() {
    try {
      device_.free(address_);
    } catch (...) {  // the device is broken: the measurement has failed with the reason already
    }
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  CUdeviceptr address() const { return address_; }

 private:
  CudaDevice& device_;
  CUdeviceptr address_;
};

// A kernel on its way to the device.
struct Run {
  CudaDevice& device;
  const jit::Loaded& kernel;
  CudaLaunch launch;
  Timer timer;

  Run(CudaDevice& d, const jit::Loaded& k, unsigned blocks) : device(d), kernel(k), timer(d) {
    launch.block_x = kThreads;
    launch.grid_x = blocks;
  }
  void start(void** parameters) { device.launch(kernel.function, launch, nullptr, parameters, kernel.name.c_str()); }
  double seconds(void** parameters) {
    return timer.seconds([&] { start(parameters); });
  }
  // The highest rate of several runs that each take about kRunSeconds; `work`: of an iteration of the whole grid.
  double best(double work, int& iterations, void** parameters) {
    seconds(parameters);
    const double once = seconds(parameters);
    iterations = static_cast<int>(std::clamp(iterations * kRunSeconds / once, 1.0 * iterations, 1e8));
    double best = 0;
    for (int i = 0; i < kRuns; ++i) best = std::max(best, work * iterations / seconds(parameters));
    return best;
  }
};

// Several times the L2 cache, so that most of it comes from memory every time, as far as half of what is free has room for it; half of it is copied
// to the other half.
double memory_rate(CudaDevice& device, const jit::Loaded& kernel, bool copy) {
  const CudaDeviceInfo& info = device.info();
  size_t free = 0, total = 0;
  device.memory(free, total);
  const size_t wanted = static_cast<size_t>(std::max<int64_t>(int64_t{1} << 30, 16 * info.l2_bytes));
  const size_t bytes = std::max<size_t>(std::min(wanted, free / 2) / 32 * 32, 1 << 20);
  const DeviceMemory memory(device, bytes);
  Run run(device, kernel, static_cast<unsigned>(info.multiprocessors * 8));
  CUdeviceptr data = memory.address(), out = copy ? data + bytes / 2 : data;
  long long count = static_cast<long long>(bytes / (copy ? 32 : 16));
  void* reading[] = {&data, &count, &out};
  void* copying[] = {&data, &out, &count};
  device.check(cuda_driver().memsetD8Async(data, 1, bytes, nullptr), "setting memory");
  double best = 0;
  for (int i = 0; i < kRuns; ++i) best = std::max(best, static_cast<double>(bytes) / run.seconds(copy ? copying : reading));
  return best;
}

// A quarter of the cache, which stays in it wherever the hardware keeps a second copy of some.
double l2_rate(CudaDevice& device, const jit::Loaded& kernel) {
  const CudaDeviceInfo& info = device.info();
  Run run(device, kernel, static_cast<unsigned>(info.multiprocessors * 8));
  const int64_t step = int64_t{4} * kThreads * run.launch.grid_x;
  long long count = std::max<int64_t>(1, info.l2_bytes / 4 / 16 / step) * step;
  const size_t bytes = static_cast<size_t>(count) * 16;
  const DeviceMemory memory(device, bytes);
  CUdeviceptr data = memory.address();
  int rounds = 4;
  void* parameters[] = {&data, &count, &rounds, &data};
  device.check(cuda_driver().memsetD8Async(data, 1, bytes, nullptr), "setting memory");
  return run.best(static_cast<double>(bytes), rounds, parameters);
}

double arithmetic_rate(CudaDevice& device, const jit::Loaded& kernel, CudaPeak peak, int target) {
  const DeviceMemory memory(device, 4 * kThreads);
  // One block of two warpgroups for wgmma, else enough warps to hide the instructions' latency.
  const int blocks = peak == CudaPeak::kMatrix && target == 90 ? 1 : peak == CudaPeak::kExp || peak == CudaPeak::kShared ? 4 : 2;
  Run run(device, kernel, static_cast<unsigned>(device.info().multiprocessors * blocks));
  CUdeviceptr out = memory.address();
  int iterations = 100;
  void* parameters[] = {&out, &iterations};
  return run.best(work_of_thread(peak, target) * kThreads * run.launch.grid_x, iterations, parameters);
}

double launch_rate(CudaDevice& device, const jit::Loaded& kernel, bool wait) {
  constexpr int kLaunches = 200;
  Run run(device, kernel, 1);
  double best = 0;
  for (int i = 0; i <= kRuns; ++i) {  // the first one warms up
    const auto start = std::chrono::steady_clock::now();
    const double on_stream = run.timer.seconds([&] {
      for (int n = 0; n < kLaunches; ++n) {
        run.start(nullptr);
        if (wait) device.check(cuda_driver().streamSynchronize(nullptr), "waiting for a kernel");
      }
    });
    const double seconds = wait ? std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() : on_stream;
    if (i > 0) best = std::max(best, kLaunches / std::max(seconds, 1e-9));
  }
  return best;
}

}  // namespace

std::vector<jit::Request> cuda_peak_requests(int arch) {
  std::vector<jit::Request> requests;
  for (const CudaPeak peak : kCudaPeaks)
    if (peak != CudaPeak::kRoundTrip) requests.push_back(request_of(jit::key_of_pod(key_of(peak, arch))));
  return requests;
}

double measure_cuda_peak(CudaDevice& device, CudaPeak peak) {
  const CudaDeviceInfo& info = device.info();
  const Architecture* known = architecture_for(info.capability());
  if (!known)
    throw Error(ErrorCode::kUnsupported,
                text("CUDA device ", info.index, " has compute capability ", info.major, ".", info.minor, "; its peaks are not known"));
  const bool round_trip = peak == CudaPeak::kRoundTrip;
  const jit::KernelKey key = jit::key_of_pod(key_of(round_trip ? CudaPeak::kLaunch : peak, known->capability));
  const jit::Loaded& kernel = jit::kernel_table().get(device, key, request_of);
  const CudaCurrent scope = device.current();
  switch (peak) {
    case CudaPeak::kRead:
    case CudaPeak::kCopy: return memory_rate(device, kernel, peak == CudaPeak::kCopy);
    case CudaPeak::kL2: return l2_rate(device, kernel);
    case CudaPeak::kLaunch:
    case CudaPeak::kRoundTrip: return launch_rate(device, kernel, round_trip);
    default: return arithmetic_rate(device, kernel, peak, known->capability);
  }
}

}  // namespace fattn::core
