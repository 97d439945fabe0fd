// Each peak is the best of several short runs of a kernel that does nothing else (kernels/measure).
#include "backend/cuda/peak.h"

#include <algorithm>
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

jit::Request request_of(const jit::KernelKey& packed) {
  const auto key = jit::pod_of_key<PeakKey>(packed);
  jit::Request request;
  request.arch = key.target;
  const std::string bounds = text("extern \"C\" __global__ void __launch_bounds__(", kThreads, ") ");
  switch (static_cast<CudaPeak>(key.peak)) {
    case CudaPeak::kFma:
      request.entry = "fattn_peak_fma";
      request.source = "#include \"kernels/measure/peaks.h\"\n" + bounds + "fattn_peak_fma(float* out, int n) { fattn::peaks::fma(out, n); }\n";
      break;
    case CudaPeak::kRead:
      request.entry = "fattn_peak_read";
      request.source = "#include \"kernels/measure/peaks.h\"\n" + bounds +
                       "fattn_peak_read(const uint4* data, long long count, float* out) { fattn::peaks::read(data, count, out); }\n";
      break;
    case CudaPeak::kMatrix:
      request.entry = "fattn_peak_matrix";
      request.arch_specific = key.target == 90;
      request.source = request.arch_specific ? "#include \"kernels/measure/peak_wgmma.h\"\n" + bounds +
                                                   "fattn_peak_matrix(float* out, int n) { fattn::peaks::wgmma(out, n); }\n"
                                             : "#include \"kernels/measure/peak_mma.h\"\n" + bounds +
                                                   text("fattn_peak_matrix(float* out, int n) { fattn::peaks::mma<", key.target, ">(out, n); }\n");
      break;
  }
  return request;
}

// FLOP of a thread and iteration: kernels/measure.
double flops_of_thread(CudaPeak peak, int target) {
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

}  // namespace

std::vector<jit::Request> cuda_peak_requests(int arch) {
  std::vector<jit::Request> requests;
  for (const CudaPeak peak : {CudaPeak::kMatrix, CudaPeak::kFma, CudaPeak::kRead})
    requests.push_back(request_of(jit::key_of_pod(key_of(peak, arch))));
  return requests;
}

double measure_cuda_peak(CudaDevice& device, CudaPeak peak) {
  const CudaDeviceInfo& info = device.info();
  const Architecture* known = architecture_for(info.capability());
  if (!known)
    throw Error(ErrorCode::kUnsupported,
                text("CUDA device ", info.index, " has compute capability ", info.major, ".", info.minor, "; its peaks are not known"));
  const jit::KernelKey key = jit::key_of_pod(key_of(peak, known->capability));
  const jit::Loaded& kernel = jit::kernel_table().get(device, key, request_of);
  const CudaCurrent scope = device.current();
  Timer timer(device);
  CudaLaunch launch;
  launch.block_x = kThreads;

  if (peak == CudaPeak::kRead) {
    // Several times the L2 cache, so that most of it comes from memory every time.
    const size_t bytes = static_cast<size_t>(std::max<int64_t>(int64_t{1} << 30, 16 * info.l2_bytes));
    const DeviceMemory memory(device, bytes);
    launch.grid_x = static_cast<unsigned>(info.multiprocessors * 8);
    CUdeviceptr data = memory.address(), out = memory.address();
    long long count = static_cast<long long>(bytes / 16);
    void* parameters[] = {&data, &count, &out};
    device.check(cuda_driver().memsetD8Async(data, 1, bytes, nullptr), "setting memory");
    double best = 0;
    for (int run = 0; run < kRuns; ++run)
      best = std::max(best, static_cast<double>(bytes) /
                                timer.seconds([&] { device.launch(kernel.function, launch, nullptr, parameters, kernel.name.c_str()); }));
    return best;
  }

  const DeviceMemory memory(device, 4 * kThreads);
  // One block of two warpgroups for wgmma, else enough warps to hide the instructions' latency.
  const bool warpgroups = peak == CudaPeak::kMatrix && known->capability == 90;
  launch.grid_x = static_cast<unsigned>(info.multiprocessors * (warpgroups ? 1 : 2));
  const double flops = flops_of_thread(peak, known->capability) * kThreads * launch.grid_x;
  CUdeviceptr out = memory.address();
  int iterations = 100;
  void* parameters[] = {&out, &iterations};
  const auto run = [&] { return timer.seconds([&] { device.launch(kernel.function, launch, nullptr, parameters, kernel.name.c_str()); }); };
  run();
  const double once = run();
  iterations = static_cast<int>(std::clamp(iterations * kRunSeconds / once, 100.0, 1e8));
  double best = 0;
  for (int i = 0; i < kRuns; ++i) best = std::max(best, flops * iterations / run());
  return best;
}

}  // namespace fattn::core
