// The environment block of a record.
#include "measure/environment.h"

#include <sys/utsname.h>

#include <cstdlib>
#include <ctime>
#include <fstream>
#include <optional>
#include <string>

#include "fattn/device.hpp"
#include "fattn/system.hpp"
#include "measure/commit.h"
#include "measure/gpu_sensors.h"

namespace fattn::measure {
namespace {

using nlohmann::ordered_json;

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

ordered_json text_or_null(const std::string& text) { return text.empty() ? ordered_json(nullptr) : ordered_json(text); }

std::string distribution() {
  std::ifstream file("/etc/os-release");
  const std::string key = "PRETTY_NAME=\"";
  for (std::string line; std::getline(file, line);)
    if (line.compare(0, key.size(), key) == 0 && line.size() > key.size()) return line.substr(key.size(), line.size() - key.size() - 1);
  return {};
}

}  // namespace

std::string now_utc() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

ordered_json environment() {
  const fattn_cpu_info cpu = cpu_info();
  ordered_json isas = ordered_json::array();
  for (Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmx, Isa::kNeon})
    if (available(cpu, isa)) isas.push_back(name_of(isa));
  utsname system{};
  uname(&system);
  double load[1] = {0};
  const bool has_load = getloadavg(load, 1) == 1;
  ordered_json gpus = ordered_json::array();
  for (const fattn_cuda_info& gpu : cuda::devices()) {
    const GpuSensors sensors(gpu);
    const std::optional<double> limit = sensors.power_limit_w();
    gpus.push_back({{"device", "cuda:" + std::to_string(gpu.index)},
                    {"name", gpu.name},
                    {"capability", std::to_string(gpu.capability_major) + "." + std::to_string(gpu.capability_minor)},
                    {"multiprocessors", gpu.multiprocessors},
                    {"memory_bytes", gpu.memory_bytes},
                    {"clock_khz_max", gpu.clock_khz},
                    {"cuda_driver_version", gpu.driver_version},
                    {"power_limit_w", limit ? ordered_json(*limit) : ordered_json(nullptr)},
                    {"power_reading", !sensors.problem().empty()   ? ordered_json(nullptr)
                                      : sensors.power_is_instant() ? ordered_json("instant")
                                                                   : ordered_json("average")},
                    {"sensors_problem", text_or_null(sensors.problem())}});
  }
  ordered_json environment = {
      {"date", now_utc()},
      {"library_version", fattn_version()},
      {"commit", text_or_null(source_commit())},
      {"compiler", __VERSION__},
      {"cpu",
       {{"vendor", cpu.vendor},
        {"model", cpu.model},
        {"logical_cpus", cpu.logical_cpus},
        {"usable_threads", cpu.usable_threads},
        {"isas", isas},
        {"isa_default", name_of(static_cast<Isa>(cpu.isa_default))},
        {"l1d_bytes", cpu.l1d_bytes},
        {"l2_bytes", cpu.l2_bytes},
        {"l3_bytes", cpu.l3_bytes},
        {"governor", text_or_null(first_line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"))}}},
      {"memory_bytes", cpu.memory_bytes},
      {"memory_available_bytes", cpu.memory_available_bytes},
      {"os", text_or_null(distribution())},
      {"kernel", std::string(system.sysname) + " " + system.release + " " + system.machine},
      {"load_average", has_load ? ordered_json(load[0]) : ordered_json(nullptr)},
  };
  if (!gpus.empty()) environment["gpus"] = std::move(gpus);
  return environment;
}

}  // namespace fattn::measure
