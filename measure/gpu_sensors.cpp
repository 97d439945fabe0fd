// Opens NVML, whose C interface is declared here as far as it is used: types and values as NVIDIA's reference documents them.
#include "measure/gpu_sensors.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdint>
#include <utility>

#include "fattn/device.hpp"
#include "measure/statistics.h"

namespace fattn::measure {

struct NvmlFieldValue {
  unsigned field = 0, scope = 0;
  int64_t timestamp_us = 0, latency_us = 0;
  int type = 0, status = 0;
  union {
    double real;
    uint64_t whole;
    unsigned small;
  } value = {};
};
static_assert(sizeof(NvmlFieldValue) == 40);

namespace {

constexpr int kClockSm = 1;
constexpr unsigned kPowerInstant = 186;
constexpr int kUnsignedInt = 1;

// As for the driver itself: the loader's folders, then those where containers, WSL and NixOS put it without telling the loader.
std::vector<std::string> usual_places() {
  std::vector<std::string> all{"libnvidia-ml.so.1"};
  for (const char* path :
       {"/usr/local/nvidia/lib64/libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1", "/run/opengl-driver/lib/libnvidia-ml.so.1"})
    if (access(path, F_OK) == 0) all.emplace_back(path);
  return all;
}

// Fills `to`, whose reason then says why `library` cannot be used, if it cannot.
void bind(void* library, Nvml& to) {
  std::string missing;
  const auto optional = [&]<class Function>(Function& function, const char* symbol) {
    function = reinterpret_cast<Function>(dlsym(library, symbol));
  };
  const auto needed = [&](auto& function, const char* symbol) {
    optional(function, symbol);
    if (!function && missing.empty()) missing = symbol;
  };
  needed(to.init, "nvmlInit_v2");
  needed(to.errorString, "nvmlErrorString");
  needed(to.deviceGetHandleByPciBusId, "nvmlDeviceGetHandleByPciBusId_v2");
  needed(to.deviceGetClockInfo, "nvmlDeviceGetClockInfo");
  needed(to.deviceGetPowerUsage, "nvmlDeviceGetPowerUsage");
  optional(to.deviceGetEnforcedPowerLimit, "nvmlDeviceGetEnforcedPowerLimit");
  optional(to.deviceGetFieldValues, "nvmlDeviceGetFieldValues");
  optional(to.deviceGetCurrentClocksEventReasons, "nvmlDeviceGetCurrentClocksEventReasons");
  optional(to.deviceGetCount, "nvmlDeviceGetCount_v2");
  optional(to.deviceGetHandleByIndex, "nvmlDeviceGetHandleByIndex_v2");
  optional(to.deviceGetName, "nvmlDeviceGetName");
  optional(to.deviceGetUtilizationRates, "nvmlDeviceGetUtilizationRates");
  optional(to.deviceGetMemoryInfo, "nvmlDeviceGetMemoryInfo");
  optional(to.deviceGetTemperature, "nvmlDeviceGetTemperature");
  optional(to.deviceGetMaxClockInfo, "nvmlDeviceGetMaxClockInfo");
  optional(to.deviceGetComputeRunningProcesses, "nvmlDeviceGetComputeRunningProcesses_v3");
  if (!to.deviceGetCurrentClocksEventReasons) optional(to.deviceGetCurrentClocksEventReasons, "nvmlDeviceGetCurrentClocksThrottleReasons");
  if (!missing.empty()) {
    to.reason = "it has no function " + missing;
    return;
  }
  const int status = to.init();
  to.reason = status == 0 ? "" : std::string("nvmlInit failed: ") + to.errorString(status);
}

}  // namespace

Nvml open_nvml(const std::vector<std::string>& candidates) {
  std::string tried;
  for (const std::string& name : candidates) {
    Nvml found;
    if (void* const library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) {
      bind(library, found);
      if (found) return found;
      dlclose(library);
    } else {
      const char* const error = dlerror();
      found.reason = error ? error : "dlopen gave no reason";
    }
    tried += (tried.empty() ? "" : "; ") + (found.reason.rfind(name + ":", 0) == 0 ? "" : name + ": ") + found.reason;
  }
  Nvml none;
  none.reason = "no usable NVML, which comes with NVIDIA's driver. Tried " + tried;
  return none;
}

const Nvml& nvml() {
  static const Nvml& library = *new Nvml(open_nvml(usual_places()));  // never destroyed: a watch may outlive static destruction
  return library;
}

GpuReading median_of(const std::vector<GpuReading>& readings) {
  const auto median = [&](std::optional<double> GpuReading::*number) -> std::optional<double> {
    std::vector<double> known;
    for (const GpuReading& reading : readings)
      if (reading.*number) known.push_back(*(reading.*number));
    if (known.empty()) return std::nullopt;
    return summarize(std::move(known)).median;
  };
  unsigned held_back = 0;
  for (const GpuReading& reading : readings) held_back |= reading.held_back;
  return {median(&GpuReading::sm_clock_mhz), median(&GpuReading::power_w), held_back};
}

GpuSensors::GpuSensors(const fattn_cuda_info& gpu, const Nvml& library) : nvml_(library) {
  if (!nvml_) {
    problem_ = nvml_.reason;
    return;
  }
  if (const int status = nvml_.deviceGetHandleByPciBusId(gpu.pci_bus_id, &device_); status != 0) {
    problem_ = std::string("NVML finds no device ") + gpu.pci_bus_id + ": " + nvml_.errorString(status);
    return;
  }
  look();
}

GpuSensors::GpuSensors(Nvml::Device device, const Nvml& library) : nvml_(library), device_(device) { look(); }

void GpuSensors::look() {
  instant_ = true;
  instant_ = power().has_value();
  unsigned mhz = 0;
  const int status = nvml_.deviceGetClockInfo(device_, kClockSm, &mhz);
  if (status != 0 && !power()) problem_ = std::string("NVML says neither clock nor power of the device: ") + nvml_.errorString(status);
}

GpuReading GpuSensors::read() const {
  GpuReading reading;
  if (!problem_.empty()) return reading;
  unsigned mhz = 0;
  if (nvml_.deviceGetClockInfo(device_, kClockSm, &mhz) == 0 && mhz > 0) reading.sm_clock_mhz = mhz;
  reading.power_w = power();
  unsigned long long reasons = 0;
  if (nvml_.deviceGetCurrentClocksEventReasons && nvml_.deviceGetCurrentClocksEventReasons(device_, &reasons) == 0)
    for (const HeldBack& one : kHeldBack) reading.held_back |= one.bit & static_cast<unsigned>(reasons);
  return reading;
}

std::optional<double> GpuSensors::power() const {
  unsigned milliwatts = 0;
  if (instant_) {
    NvmlFieldValue value;
    value.field = kPowerInstant;
    if (!nvml_.deviceGetFieldValues || nvml_.deviceGetFieldValues(device_, 1, &value) != 0 || value.status != 0 || value.type != kUnsignedInt)
      return std::nullopt;
    milliwatts = value.value.small;
  } else if (nvml_.deviceGetPowerUsage(device_, &milliwatts) != 0) {
    return std::nullopt;
  }
  return milliwatts > 0 ? std::optional<double>(milliwatts / 1e3) : std::nullopt;
}

std::optional<double> GpuSensors::power_limit_w() const {
  unsigned milliwatts = 0;
  if (!problem_.empty() || !nvml_.deviceGetEnforcedPowerLimit || nvml_.deviceGetEnforcedPowerLimit(device_, &milliwatts) != 0) return std::nullopt;
  return milliwatts / 1e3;
}

std::optional<GpuSensors> sensors_of(int cuda_device) {
  try {
    GpuSensors sensors(cuda::info(cuda_device));
    if (sensors.problem().empty()) return sensors;
  } catch (const Error&) {  // no such device; who computes there says so
  }
  return std::nullopt;
}

GpuWatch::GpuWatch(const GpuSensors& sensors, Clock::time_point busy_since)
    : sensors_(sensors), busy_since_(busy_since), thread_([this] { watch(); }) {}

bool GpuWatch::found() {
  const std::lock_guard lock(mutex_);
  return !kept_.empty();
}

std::vector<GpuReading> GpuWatch::stop() {
  ended_ = true;
  if (thread_.joinable()) thread_.join();
  return std::move(kept_);
}

void GpuWatch::watch() {
  GpuReading last = sensors_.read();
  Clock::time_point since = Clock::now();
  for (;;) {
    std::this_thread::sleep_for(kEvery);
    const GpuReading now = sensors_.read();
    const auto time = Clock::now();
    if (ended_) break;
    const bool measured = now.sm_clock_mhz != last.sm_clock_mhz || now.power_w != last.power_w;
    if ((measured && time - busy_since_ >= kSettle) || time - since >= kSurelyMeasured) {
      const std::lock_guard lock(mutex_);
      kept_.push_back(now);
      since = time;
    }
    if (measured) since = time;
    last = now;
  }
}

}  // namespace fattn::measure
