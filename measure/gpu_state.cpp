// NVML's structures as its reference documents them.
#include "measure/gpu_state.h"

#include <algorithm>

namespace fattn::measure {

struct NvmlUtilization {
  unsigned gpu = 0, memory = 0;  // percent
};
struct NvmlMemory {
  unsigned long long total = 0, free = 0, used = 0;
};
struct NvmlProcess {
  unsigned pid = 0;
  unsigned long long memory = 0;
  unsigned gpu_instance = 0, compute_instance = 0;
};
static_assert(sizeof(NvmlProcess) == 24);

namespace {

constexpr int kSmClock = 1, kMemoryClock = 2, kTemperatureOfGpu = 0;
constexpr unsigned long long kNotTold = ~0ull;

template <class... Arguments, class... Given>
std::optional<double> number(int (*function)(Arguments...), Given... given) {
  unsigned value = 0;
  if (!function || function(given..., &value) != 0) return std::nullopt;
  return value;
}

std::optional<std::vector<GpuProcess>> processes_of(const Nvml& nvml, Nvml::Device device) {
  constexpr unsigned kMost = 256;
  std::vector<NvmlProcess> found(kMost);
  unsigned count = kMost;
  if (!nvml.deviceGetComputeRunningProcesses || nvml.deviceGetComputeRunningProcesses(device, &count, found.data()) != 0) return std::nullopt;
  found.resize(std::min(count, kMost));
  std::vector<GpuProcess> processes;
  processes.reserve(found.size());
  for (const NvmlProcess& one : found) processes.push_back({one.pid, one.memory == kNotTold ? std::nullopt : std::optional<uint64_t>(one.memory)});
  std::stable_sort(processes.begin(), processes.end(),
                   [](const GpuProcess& a, const GpuProcess& b) { return a.memory_bytes.value_or(0) > b.memory_bytes.value_or(0); });
  return processes;
}

}  // namespace

GpuMonitor::GpuMonitor(const Nvml& library) : nvml_(library) {
  if (!nvml_) {
    problem_ = nvml_.reason;
    return;
  }
  if (!nvml_.deviceGetCount || !nvml_.deviceGetHandleByIndex) {
    problem_ = "the driver's NVML does not name its devices";
    return;
  }
  unsigned count = 0;
  if (const int status = nvml_.deviceGetCount(&count); status != 0) {
    problem_ = std::string("NVML does not count its devices: ") + nvml_.errorString(status);
    return;
  }
  for (unsigned i = 0; i < count; ++i) {
    Nvml::Device handle = nullptr;
    if (const int status = nvml_.deviceGetHandleByIndex(i, &handle); status != 0) {
      if (problem_.empty()) problem_ = "NVML does not let GPU " + std::to_string(i) + " be read: " + nvml_.errorString(status);
      continue;
    }
    char name[96] = "";
    if (!nvml_.deviceGetName || nvml_.deviceGetName(handle, name, sizeof name) != 0) name[0] = '\0';
    name[sizeof name - 1] = '\0';
    devices_.push_back({i, handle, name, GpuSensors(handle, nvml_)});
  }
  if (!devices_.empty())
    problem_.clear();
  else if (problem_.empty())
    problem_ = "NVML knows no GPU";
}

std::vector<GpuState> GpuMonitor::read() const {
  std::vector<GpuState> all;
  for (const Device& device : devices_) {
    GpuState state;
    state.index = device.index;
    state.name = device.name;
    NvmlUtilization rates;
    if (nvml_.deviceGetUtilizationRates && nvml_.deviceGetUtilizationRates(device.handle, &rates) == 0) {
      state.busy = rates.gpu / 100.0;
      state.memory_busy = rates.memory / 100.0;
    }
    NvmlMemory memory;
    if (nvml_.deviceGetMemoryInfo && nvml_.deviceGetMemoryInfo(device.handle, &memory) == 0) {
      state.memory_used_bytes = memory.used;
      state.memory_bytes = memory.total;
    }
    const GpuReading reading = device.sensors.read();
    state.sm_clock_mhz = reading.sm_clock_mhz;
    state.power_w = reading.power_w;
    state.held_back = reading.held_back;
    state.power_limit_w = device.sensors.power_limit_w();
    state.highest_sm_clock_mhz = number(nvml_.deviceGetMaxClockInfo, device.handle, kSmClock);
    state.memory_clock_mhz = number(nvml_.deviceGetClockInfo, device.handle, kMemoryClock);
    state.temperature_c = number(nvml_.deviceGetTemperature, device.handle, kTemperatureOfGpu);
    state.processes = processes_of(nvml_, device.handle);
    all.push_back(std::move(state));
  }
  return all;
}

}  // namespace fattn::measure
