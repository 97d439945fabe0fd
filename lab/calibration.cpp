// Every number of a record is checked before any is used: a record may be cut off, edited, or another program's.
#include "lab/calibration.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <fstream>
#include <iterator>
#include <utility>

#include "fattn/cache.hpp"
#include "fattn/device.hpp"
#include "fattn/system.hpp"

namespace fattn::lab {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kVersion = 1;
constexpr off_t kMostBytes = off_t{1} << 20;
constexpr const char* kAgain = "`fattn calibrate --force` measures anew";

const std::vector<Quantity> kCpu = {
    {"fma_flops_per_s", "fp32 FMA, all threads"},
    {"fma_flops_per_s_one_thread", "fp32 FMA, one thread"},
    {"bf16_flops_per_s", "bf16 products, all threads"},
    {"bf16_flops_per_s_one_thread", "bf16 products, one thread"},
    {"exp_per_s", "exponentials, all threads"},
    {"exp_per_s_one_thread", "exponentials, one thread"},
    {"l1_read_bytes_per_s", "L1 read, all threads"},
    {"l1_read_bytes_per_s_one_thread", "L1 read, one thread"},
    {"l1_copy_bytes_per_s", "L1 copy, all threads"},
    {"l1_copy_bytes_per_s_one_thread", "L1 copy, one thread"},
    {"l2_read_bytes_per_s", "L2 read, all threads"},
    {"l2_read_bytes_per_s_one_thread", "L2 read, one thread"},
    {"l2_copy_bytes_per_s", "L2 copy, all threads"},
    {"l2_copy_bytes_per_s_one_thread", "L2 copy, one thread"},
    {"l3_read_bytes_per_s", "L3 read, all threads"},
    {"l3_read_bytes_per_s_one_thread", "L3 read, one thread"},
    {"l3_copy_bytes_per_s", "L3 copy, all threads"},
    {"l3_copy_bytes_per_s_one_thread", "L3 copy, one thread"},
    {"dram_read_bytes_per_s", "DRAM read, all threads"},
    {"dram_read_bytes_per_s_one_thread", "DRAM read, one thread"},
    {"dram_copy_bytes_per_s", "DRAM copy, all threads"},
    {"dram_copy_bytes_per_s_one_thread", "DRAM copy, one thread"},
    {"fresh_memory_bytes_per_s", "first writes to new pages"},
    {"call_s", "a call, one thread"},
    {"fork_join_s", "start and end of all threads"},
};
const std::vector<Quantity> kCuda = {
    {"matrix_flops_per_s", "matrix products, 16 bits"},
    {"fma_flops_per_s", "fp32 FMA"},
    {"exp_per_s", "exponentials"},
    {"shared_read_bytes_per_s", "shared memory read, all SMs"},
    {"l2_read_bytes_per_s", "L2 read"},
    {"dram_read_bytes_per_s", "DRAM read"},
    {"dram_copy_bytes_per_s", "DRAM copy"},
    {"launch_s", "a launch behind another"},
    {"round_trip_s", "a launch that is waited for"},
};
const std::vector<std::string> kCpuFacts = {"threads", "logical_cpus", "l1d_bytes", "l2_bytes", "l3_bytes", "memory_bytes"};
const std::vector<std::string> kCudaFacts = {
    "multiprocessors", "shared_per_multiprocessor_bytes", "shared_per_block_bytes", "registers_per_multiprocessor", "l2_bytes", "memory_bytes"};

const std::vector<std::string>& facts_of(bool cuda) { return cuda ? kCudaFacts : kCpuFacts; }

[[noreturn]] void fail(const std::string& source, const std::string& what) {
  throw CalibrationError(fmt::format("the calibration {}: {}; {}", source, what, kAgain));
}

int index_of(const std::string& device) { return device.size() > 5 ? std::stoi(device.substr(5)) : 0; }

// A value of an object, of this kind.
const Json& member(const Json& object, const char* name, Json::value_t kind, const std::string& source) {
  if (!object.is_object() || !object.contains(name)) fail(source, fmt::format("it has no '{}'", name));
  const Json& value = object[name];
  const bool fits = kind == Json::value_t::number_float ? value.is_number() : value.type() == kind;
  if (!fits) fail(source, fmt::format("its '{}' is {}, not {}", name, value.type_name(), Json(kind).type_name()));
  return value;
}

double number(const Json& object, const char* name, const std::string& source) {
  const double value = member(object, name, Json::value_t::number_float, source).get<double>();
  if (!std::isfinite(value)) fail(source, fmt::format("its '{}' is no finite number", name));
  return value;
}

Measured measured_from(const Json& json, const std::string& name, const std::string& source) {
  const Json& object = member(json, name.c_str(), Json::value_t::object, source);
  Measured m;
  if (object.contains("value") && object["value"].is_null()) {
    m.reason = member(object, "reason", Json::value_t::string, source).get<std::string>();
    if (m.reason.empty()) fail(source, fmt::format("'{}' has neither a value nor a reason", name));
    return m;
  }
  m.value = number(object, "value", source);
  m.low = number(object, "low", source);
  m.high = number(object, "high", source);
  const double samples = number(object, "samples", source);
  if (!(m.value > 0 && m.low > 0 && m.low <= m.value && m.value <= m.high))
    fail(source, fmt::format("'{}' is {}, between {} and {}: a rate or a time is above 0 and inside its range", name, m.value, m.low, m.high));
  if (!(samples >= 1 && samples <= 1e6 && samples == std::floor(samples))) fail(source, fmt::format("'{}' has {} samples", name, samples));
  m.samples = static_cast<int>(samples);
  return m;
}

}  // namespace

const std::vector<Quantity>& quantities(bool cuda) { return cuda ? kCuda : kCpu; }

MachineIdentity identity_of(const std::string& device) {
  const fattn_cpu_info cpu = cpu_info();
  MachineIdentity identity = {{"fattn version", fattn_version()},
                              {"processor", std::string(cpu.vendor) + " " + cpu.model},
                              {"number of threads", std::to_string(cpu.usable_threads)},
                              {"instruction set", name_of(static_cast<Isa>(cpu.isa_default))}};
  if (device == "cpu") return identity;
  const fattn_cuda_info gpu = cuda::info(index_of(device));
  identity.insert(identity.end(), {{"GPU", gpu.name},
                                   {"GPU's uuid", gpu.uuid},
                                   {"number of multiprocessors", std::to_string(gpu.multiprocessors)},
                                   {"CUDA version of the driver", fmt::format("{}.{}", gpu.driver_version / 1000, gpu.driver_version % 1000 / 10)}});
  return identity;
}

double Calibration::of(const std::string& name) const { return measured.at(name).value; }
double Calibration::fact(const std::string& name) const { return facts.at(name); }

Json to_json(const Calibration& c) {
  Json machine = Json::object(), facts = Json::object(), measured = Json::object();
  for (const auto& [name, value] : c.machine) machine[name] = value;
  for (const std::string& name : facts_of(c.on_cuda())) facts[name] = c.fact(name) > 0 ? Json(c.fact(name)) : Json(nullptr);
  for (const Quantity& q : quantities(c.on_cuda())) {
    const Measured& m = c.measured.at(q.name);
    measured[q.name] = m.known() ? Json{{"value", m.value}, {"low", m.low}, {"high", m.high}, {"spread_fraction", m.spread()}, {"samples", m.samples}}
                                 : Json{{"value", nullptr}, {"reason", m.reason}};
  }
  return {{"fattn_calibration", kVersion},
          {"device", c.device},
          {"machine", machine},
          {"facts", facts},
          {"measured", measured},
          {"kernels", c.kernels ? to_json(*c.kernels) : Json(nullptr)},
          {"seconds", c.seconds},
          {"environment", c.environment}};
}

Calibration calibration_from_json(const std::string& text, const std::string& source) {
  Json json;
  try {
    json = Json::parse(text);
  } catch (const Json::exception&) {
    fail(source, "it is no JSON, or cut off");
  }
  if (!json.is_object() || !json.contains("fattn_calibration")) fail(source, "it is no calibration of fattn");
  if (!json["fattn_calibration"].is_number_integer() || json["fattn_calibration"] != kVersion)
    fail(source, fmt::format("it is of version {}, this fattn reads version {}",
                             json["fattn_calibration"].dump(-1, ' ', true, Json::error_handler_t::replace), kVersion));
  Calibration c;
  c.device = member(json, "device", Json::value_t::string, source).get<std::string>();
  if (c.device != "cpu" && c.device != "cuda") fail(source, "its 'device' is neither cpu nor cuda");
  for (const auto& [name, value] : member(json, "machine", Json::value_t::object, source).items()) {
    if (!value.is_string()) fail(source, "its 'machine' has a value that is no text");
    c.machine.emplace_back(name, value.get<std::string>());
  }
  const Json& facts = member(json, "facts", Json::value_t::object, source);
  for (const std::string& name : facts_of(c.on_cuda())) {
    const bool unknown = facts.contains(name) && facts[name].is_null();
    const double value = unknown ? 0 : number(facts, name.c_str(), source);
    if (!(value >= 0 && value < 1e18)) fail(source, fmt::format("its '{}' is {}", name, value));
    c.facts[name] = value;
  }
  const Json& measured = member(json, "measured", Json::value_t::object, source);
  for (const Quantity& q : quantities(c.on_cuda())) c.measured[q.name] = measured_from(measured, q.name, source);
  if (json.contains("kernels") && !json["kernels"].is_null()) {
    try {
      c.kernels = kernel_times_from_json(json["kernels"]);
    } catch (const std::invalid_argument& error) {
      fail(source, fmt::format("of its 'kernels': {}", error.what()));
    }
  }
  c.seconds = number(json, "seconds", source);
  c.environment = member(json, "environment", Json::value_t::object, source);
  return c;
}

std::string calibration_path(const std::string& device) {
  const fattn_cache_info cache = cache::info();
  const std::string kernels = cache.path;
  const size_t slash = kernels.rfind('/');
  if (slash == std::string::npos || slash == 0)
    throw CalibrationError(fmt::format("there is no folder for a calibration: {}; name one in FATTN_CACHE_DIR", cache.reason));
  std::string name = "cpu";
  if (device != "cpu") {
    name.clear();
    const std::string uuid = cuda::info(index_of(device)).uuid;
    for (const char c : uuid.empty() ? "cuda-" + std::to_string(index_of(device)) : uuid)
      name += std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' ? c : '_';
  }
  return kernels.substr(0, slash) + "/calibration-" + name + ".json";
}

Calibration read_calibration(const std::string& path) {
  struct stat info {};
  if (stat(path.c_str(), &info) != 0)
    throw CalibrationError(fmt::format("there is no calibration {}; `fattn calibrate` makes one in less than a minute", path));
  if (!S_ISREG(info.st_mode)) fail(path, "it is no regular file");
  if (info.st_size > kMostBytes) fail(path, fmt::format("it has {} bytes, a calibration at most {}", info.st_size, kMostBytes));
  std::ifstream file(path, std::ios::binary);
  if (!file) fail(path, "it cannot be read");
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  return calibration_from_json(text, path);
}

std::string why_not_served(const Calibration& c, const std::string& device) {
  if (c.on_cuda() != (device != "cpu")) return fmt::format("it is of {}, not of {}", c.on_cuda() ? "a GPU" : "a processor", device);
  const MachineIdentity here = identity_of(device);
  std::string why;
  for (const auto& [name, value] : here) {
    const auto same_name = [&name = name](const auto& item) { return item.first == name; };
    const auto found = std::find_if(c.machine.begin(), c.machine.end(), same_name);
    if (found != c.machine.end() && found->second == value) continue;
    why += fmt::format("{}its {} was {}, here it is {}", why.empty() ? "" : "; ", name,
                       found == c.machine.end() ? "not noted" : "'" + found->second + "'", "'" + value + "'");
  }
  return why;
}

Calibration stored_calibration(const std::string& device) {
  const std::string path = calibration_path(device);
  Calibration c = read_calibration(path);
  const std::string why = why_not_served(c, device);
  if (!why.empty()) throw CalibrationError(fmt::format("the calibration {} is another machine's: {}; {}", path, why, kAgain));
  return c;
}

}  // namespace fattn::lab
