// What the driver says of each GPU of the machine at a moment, for who watches: through NVML, of which nothing is used that sets anything.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "measure/gpu_sensors.h"

namespace fattn::measure {

struct GpuProcess {
  int64_t pid = 0;  // where containers are, perhaps as the host counts
  std::optional<uint64_t> memory_bytes;
  bool operator==(const GpuProcess&) const = default;
};

// What a driver does not say is not there.
struct GpuState {
  unsigned index = 0;
  std::string name;
  std::optional<double> busy, memory_busy;  // shares of the time since the driver looked last, of up to a second
  std::optional<uint64_t> memory_used_bytes, memory_bytes;
  std::optional<double> sm_clock_mhz, highest_sm_clock_mhz, memory_clock_mhz;
  std::optional<double> power_w, power_limit_w, temperature_c;
  unsigned held_back = 0;                            // what keeps the clock below its highest, of kHeldBack
  std::optional<std::vector<GpuProcess>> processes;  // that compute there, those with the most memory first
};

class GpuMonitor {
 public:
  explicit GpuMonitor(const Nvml& library = nvml());

  // Why there will be no readings; empty if there will.
  const std::string& problem() const { return problem_; }
  std::vector<GpuState> read() const;  // in NVML's order, which is that of nvidia-smi

 private:
  struct Device {
    unsigned index;
    Nvml::Device handle;
    std::string name;
    GpuSensors sensors;
  };

  const Nvml& nvml_;
  std::vector<Device> devices_;
  std::string problem_;
};

}  // namespace fattn::measure
