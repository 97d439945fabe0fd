// The SM clock and the power draw of a CUDA device, read through NVML, which is opened at run time.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "fattn/fattn.h"

namespace fattn::measure {

struct NvmlFieldValue;
struct NvmlUtilization;
struct NvmlMemory;
struct NvmlProcess;

// NVML's functions, named as in its reference without `nvml`, and as far as they are used here. 0 is success.
struct Nvml {
  using Device = struct NvmlDeviceHandle*;
  int (*init)() = nullptr;
  const char* (*errorString)(int status) = nullptr;
  int (*deviceGetHandleByPciBusId)(const char* address, Device* device) = nullptr;
  int (*deviceGetClockInfo)(Device device, int which, unsigned* mhz) = nullptr;
  int (*deviceGetPowerUsage)(Device device, unsigned* milliwatts) = nullptr;
  // Not in every driver.
  int (*deviceGetEnforcedPowerLimit)(Device device, unsigned* milliwatts) = nullptr;
  int (*deviceGetFieldValues)(Device device, int count, NvmlFieldValue* values) = nullptr;
  int (*deviceGetCurrentClocksEventReasons)(Device device, unsigned long long* reasons) = nullptr;  // of older drivers: ...ThrottleReasons
  // For gpu_state.h alone.
  int (*deviceGetCount)(unsigned* count) = nullptr;
  int (*deviceGetHandleByIndex)(unsigned index, Device* device) = nullptr;
  int (*deviceGetName)(Device device, char* name, unsigned length) = nullptr;
  int (*deviceGetUtilizationRates)(Device device, NvmlUtilization* rates) = nullptr;
  int (*deviceGetMemoryInfo)(Device device, NvmlMemory* memory) = nullptr;
  int (*deviceGetTemperature)(Device device, int sensor, unsigned* celsius) = nullptr;
  int (*deviceGetMaxClockInfo)(Device device, int which, unsigned* mhz) = nullptr;
  int (*deviceGetComputeRunningProcesses)(Device device, unsigned* count, NvmlProcess* processes) = nullptr;

  std::string reason = "it was not opened";  // why it cannot be used; empty if it can
  explicit operator bool() const { return reason.empty(); }
};

// The first of `candidates` that can be used; it stays open.
Nvml open_nvml(const std::vector<std::string>& candidates);
// The driver's own, opened at the first call.
const Nvml& nvml();

// What NVML says at a moment. The driver measures by itself, on an H100 with driver 580 every 100 ms, and a reading gives what it measured last.
struct GpuReading {
  std::optional<double> sm_clock_mhz, power_w;
  unsigned held_back = 0;  // what keeps the clock below its highest, of kHeldBack
  bool operator==(const GpuReading&) const = default;
};
// Of each number by itself; neither, if there is no reading. What held it back at any of the moments did.
GpuReading median_of(const std::vector<GpuReading>& readings);

// What NVML calls clocks event reasons, as far as they are no one's wish. A power limit is an everyday matter; the others are not.
struct HeldBack {
  unsigned bit;
  const char *name, *words;
};
inline constexpr unsigned kPowerCap = 0x4;
inline constexpr HeldBack kHeldBack[] = {{kPowerCap, "power_cap", "its power limit"},
                                         {0x8, "hardware_slowdown", "a slowdown of its hardware"},
                                         {0x20, "thermal", "its temperature"},
                                         {0x40, "hardware_thermal", "its temperature"},
                                         {0x80, "power_brake", "the power supply"}};

class GpuSensors {
 public:
  // The device is found by its PCI address: CUDA_VISIBLE_DEVICES renumbers, and NVML does not know that.
  explicit GpuSensors(const fattn_cuda_info& gpu, const Nvml& library = nvml());
  // Of a device that NVML named.
  GpuSensors(Nvml::Device device, const Nvml& library);

  // Why there will be no readings; empty if there will.
  const std::string& problem() const { return problem_; }
  GpuReading read() const;
  // Power is that of some 25 ms before it was measured; where the driver does not know that, it is its plain number, an average over up to a second.
  bool power_is_instant() const { return instant_; }
  std::optional<double> power_limit_w() const;

 private:
  void look();
  std::optional<double> power() const;

  const Nvml& nvml_;
  Nvml::Device device_ = nullptr;
  bool instant_ = false;
  std::string problem_;
};

// Of a device of this process; nothing where there is none or its readings are not to be had.
std::optional<GpuSensors> sensors_of(int cuda_device);

// Reads on a thread of its own while it lives, and keeps what the driver measured meanwhile: a reading that differs from the one before, since
// one that does not may be of whatever was running a tenth of a second ago.
class GpuWatch {
 public:
  using Clock = std::chrono::steady_clock;
  // `busy_since`: when what is watched began to run. What is measured sooner after that than kSettle is not kept: it would be in part of what ran
  // before.
  GpuWatch(const GpuSensors& sensors, Clock::time_point busy_since);
  ~GpuWatch() { stop(); }
  GpuWatch(const GpuWatch&) = delete;
  GpuWatch& operator=(const GpuWatch&) = delete;

  bool found();
  // Ends it. If no reading differed for kSurelyMeasured, the last is one nevertheless.
  std::vector<GpuReading> stop();

  static constexpr std::chrono::milliseconds kEvery{2}, kSettle{40}, kSurelyMeasured{120};

 private:
  void watch();

  const GpuSensors& sensors_;
  const Clock::time_point busy_since_;
  std::atomic<bool> ended_{false};  // looked at every kEvery; a condition variable's timed wait is none of older C libraries
  std::mutex mutex_;                // of kept_
  std::vector<GpuReading> kept_;
  std::thread thread_;
};

}  // namespace fattn::measure
