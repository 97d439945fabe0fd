// Asks the library, and explains its answer with what the system says.
#include "cli/info.h"

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "cli/json_output.h"
#include "cli/output.h"
#include "cli/sanitize.h"
#include "fattn/fattn.hpp"

namespace fattn::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr Isa kIsas[] = {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmx, Isa::kNeon};

int affinity_cpus() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 0;
}

std::string plural(int n, const char* what) { return fmt::format("{} {}{}", n, what, n == 1 ? "" : "s"); }

// The library counts; what it counted less than follows from affinity and the variable.
std::string why_threads(const fattn_cpu_info& cpu, const std::vector<fattn_env_info>& variables) {
  for (const fattn_env_info& variable : variables)
    if (variable.is_set && std::string(variable.name) == "FATTN_NUM_THREADS") return "FATTN_NUM_THREADS is set";
  const int affinity = affinity_cpus();
  if (affinity > 0 && cpu.usable_threads < affinity)
    return fmt::format("affinity allows {}, the control group's CPU quota {}", plural(affinity, "CPU"), cpu.usable_threads);
  if (affinity > 0 && affinity < cpu.logical_cpus) return fmt::format("affinity allows {} of {}", affinity, plural(cpu.logical_cpus, "logical CPU"));
  return "no limit by affinity or control group";
}

std::string size(int64_t bytes) {
  if (bytes <= 0) return "unknown";
  return bytes < (int64_t{1} << 20) ? fmt::format("{} KiB", bytes >> 10) : fmt::format("{:.0f} MiB", static_cast<double>(bytes) / (1 << 20));
}

// What a plan picks for a plain problem: the default, or what FATTN_CPU_ISA says.
Json picked() {
  Json all = Json::object();
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const Tensor tensor(nullptr, dtype, {1, 1024, 1, 64});
    try {
      const Plan plan(ForwardTensors{tensor, tensor, tensor, tensor, {}, {}}, Options());
      const fattn_plan_info info = plan.info();  // its strings live as long as the plan
      all[name_of(dtype)] = {{"backend", name_of(static_cast<Backend>(info.backend))},
                             {"isa", name_of(static_cast<Isa>(info.cpu_isa))},
                             {"kernel", printable(info.kernel)},
                             {"reason", nullptr}};
    } catch (const Error& error) {
      all[name_of(dtype)] = {{"backend", nullptr}, {"isa", nullptr}, {"kernel", nullptr}, {"reason", printable(error.what())}};
    }
  }
  return all;
}

Json known(int64_t bytes) { return bytes > 0 ? Json(bytes) : Json(nullptr); }

// The kernel's side of NVIDIA's driver, in its own words; empty if there is none.
std::string system_driver() {
  std::ifstream version("/proc/driver/nvidia/version");
  std::string line;
  return std::getline(version, line) ? printable(line, 120) : "";
}

// Devices that the system shows, whether or not they can be used.
std::vector<std::string> gpu_traces() {
  std::vector<std::string> found;
  std::error_code ignored;
  int devices = 0;
  while (devices < 64 && std::filesystem::exists(fmt::format("/dev/nvidia{}", devices), ignored)) ++devices;
  if (devices > 0) found.push_back(plural(devices, "NVIDIA device") + " (/dev/nvidia0 ...)");
  if (std::filesystem::exists("/dev/kfd", ignored)) found.emplace_back("AMD device (/dev/kfd)");
  return found;
}

// Megahertz, or null where the driver does not say.
Json megahertz(int32_t khz) { return khz > 0 ? Json(khz / 1000) : Json(nullptr); }

std::string cuda_version(int32_t version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

Json gpus() {
  Json devices = Json::array();
  std::string reason;
  const int count = cuda::count(&reason);
  for (int i = 0; i < count; ++i) {
    const fattn_cuda_info info = cuda::info(i);
    Json device = {{"device", fmt::format("cuda:{}", i)},
                   {"name", printable(info.name)},
                   {"capability", fmt::format("{}.{}", info.capability_major, info.capability_minor)},
                   {"multiprocessors", info.multiprocessors},
                   {"memory_bytes", known(info.memory_bytes)},
                   {"memory_free_bytes", nullptr},
                   {"memory_bus_bits", info.memory_bus_bits},
                   {"l2_bytes", known(info.l2_bytes)},
                   {"shared_bytes_per_block", info.shared_per_block},
                   {"shared_bytes_per_multiprocessor", info.shared_per_multiprocessor},
                   {"clock_mhz_max", megahertz(info.clock_khz)},
                   {"memory_clock_mhz_max", megahertz(info.memory_clock_khz)},
                   {"driver_cuda_version", cuda_version(info.driver_version)},
                   {"pci_bus_id", printable(info.pci_bus_id)},
                   {"uuid", printable(info.uuid)},
                   {"reason", nullptr}};
    try {
      device["memory_free_bytes"] = cuda::memory(i).free_bytes;
    } catch (const Error& error) {  // it is there, and cannot be used now
      device["reason"] = printable(error.what());
    }
    devices.push_back(device);
  }
  return {{"available", count > 0},
          {"reason", count > 0 ? Json(nullptr) : Json(printable(reason))},
          {"driver", system_driver().empty() ? Json(nullptr) : Json(system_driver())},
          {"devices", devices},
          {"seen", gpu_traces()}};
}

Json info_json() {
  const fattn_cpu_info cpu = cpu_info();
  const auto variables = environment();
  Json isas = Json::array();
  for (Isa isa : kIsas)
    if (available(cpu, isa)) isas.push_back(name_of(isa));
  Json found_libraries = Json::array(), found_variables = Json::array();
  for (const fattn_library_info& library : libraries())
    found_libraries.push_back({{"name", printable(library.name)},
                               {"purpose", printable(library.purpose)},
                               {"loaded", library.loaded != 0},
                               {"path", library.loaded ? Json(printable(library.path)) : Json(nullptr)},
                               {"reason", library.loaded ? Json(nullptr) : Json(printable(library.reason))}});
  for (const fattn_env_info& variable : variables)
    found_variables.push_back({{"name", printable(variable.name)},
                               {"meaning", printable(variable.meaning)},
                               {"value", variable.is_set ? Json(printable(variable.value)) : Json(nullptr)}});
  return {{"fattn_info", 1},
          {"version", fattn_version()},
          {"abi_version", fattn_abi_version()},
          {"cpu",
           {{"vendor", printable(cpu.vendor)},
            {"model", printable(cpu.model)},
            {"logical_cpus", cpu.logical_cpus},
            {"usable_threads", cpu.usable_threads},
            {"usable_threads_why", why_threads(cpu, variables)},
            {"isas_available", isas},
            {"isa_default", name_of(static_cast<Isa>(cpu.isa_default))},
            {"picked", picked()},
            {"l1d_bytes", known(cpu.l1d_bytes)},
            {"l2_bytes", known(cpu.l2_bytes)},
            {"l3_bytes", known(cpu.l3_bytes)}}},
          {"memory", {{"total_bytes", known(cpu.memory_bytes)}, {"available_bytes", known(cpu.memory_available_bytes)}}},
          {"gpu", gpus()},
          {"libraries", found_libraries},
          {"environment_variables", found_variables}};
}

std::string text(const Json& value) { return value.is_string() ? value.get<std::string>() : value.dump(); }
std::string bytes(const Json& value) { return size(value.is_number() ? value.get<int64_t>() : 0); }

// What is under each other belongs to the name above.
using Lines = std::vector<std::pair<std::string, std::string>>;

void add_gpus(Lines& lines, const Json& gpu) {
  const auto mhz = [](const Json& value) { return value.is_null() ? std::string("not stated") : text(value) + " MHz"; };
  const auto add = [&](const std::string& line) { lines.emplace_back(lines.back().first == "GPU" || lines.back().first.empty() ? "" : "GPU", line); };
  if (gpu["available"] == false) {
    add("none: " + text(gpu["reason"]));
    for (const Json& seen : gpu["seen"]) add("seen, not used: " + text(seen));
    if (gpu["seen"].empty()) add("the system shows no GPU device either");
  }
  for (const Json& device : gpu["devices"]) {
    lines.emplace_back("GPU", fmt::format("{}: {}, capability {}, {} SMs, {} memory, {}", text(device["device"]), text(device["name"]),
                                          text(device["capability"]), text(device["multiprocessors"]), bytes(device["memory_bytes"]),
                                          device["memory_free_bytes"].is_null() ? "cannot be used: " + text(device["reason"])
                                                                                : bytes(device["memory_free_bytes"]) + " free"));
    add(fmt::format("L2 {}, shared memory {} a block; clocks up to {}, memory up to {} on {} bits; {}, {}", bytes(device["l2_bytes"]),
                    bytes(device["shared_bytes_per_block"]), mhz(device["clock_mhz_max"]), mhz(device["memory_clock_mhz_max"]),
                    text(device["memory_bus_bits"]), text(device["pci_bus_id"]), text(device["uuid"])));
  }
  if (!gpu["devices"].empty()) add("the driver knows CUDA up to " + text(gpu["devices"][0]["driver_cuda_version"]));
  if (!gpu["driver"].is_null()) add(text(gpu["driver"]));
}

// The text says what the JSON says.
void print(Output& out, const Json& info) {
  const Json& cpu = info["cpu"];
  std::string isas;
  for (const Json& isa : cpu["isas_available"]) isas += (isas.empty() ? "" : ", ") + text(isa);
  const auto or_unknown = [](const std::string& name, const char* unknown) { return name.empty() ? std::string(unknown) : name; };
  Lines lines = {{"fattn", text(info["version"]) + " (ABI " + text(info["abi_version"]) + ")"},
                 {"CPU", or_unknown(text(cpu["model"]), "unknown") + " (" + or_unknown(text(cpu["vendor"]), "unknown vendor") + ")"},
                 {"ISAs", isas + "; default: " + text(cpu["isa_default"])}};
  for (const auto& [dtype, pick] : cpu["picked"].items())
    lines.emplace_back(
        "", dtype + ": " +
                (pick["reason"].is_null() ? fmt::format("backend {}, isa {}: {}", text(pick["backend"]), text(pick["isa"]), text(pick["kernel"]))
                                          : text(pick["reason"])));
  lines.emplace_back(
      "Caches", fmt::format("L1d {} and L2 {} a core, L3 {} a package", bytes(cpu["l1d_bytes"]), bytes(cpu["l2_bytes"]), bytes(cpu["l3_bytes"])));
  lines.emplace_back("Memory", bytes(info["memory"]["total_bytes"]) + ", " + bytes(info["memory"]["available_bytes"]) + " available");
  lines.emplace_back("Threads", fmt::format("{} of {} usable: {}", text(cpu["usable_threads"]), plural(cpu["logical_cpus"].get<int>(), "logical CPU"),
                                            text(cpu["usable_threads_why"])));
  add_gpus(lines, info["gpu"]);
  Table machine({Column::text("what").as_key(), Column::text("found").wrapping(20)});
  machine.without_headings();
  std::string name;  // for programs every line has one
  for (const auto& [what, found] : lines) {
    if (!what.empty()) name = what;
    machine.add({out.for_programs() ? name : what, found});
  }
  out.print(machine);

  Table libraries({Column::text("library").as_key(), Column::text("found"), Column::text("for").wrapping(20)},
                  "Libraries, opened at run time if present");
  for (const Json& library : info["libraries"]) {
    const bool loaded = library["loaded"] == true;
    libraries.add({text(library["name"]), Cell(loaded ? "yes" : "no").in(loaded ? Mood::kGood : Mood::kUnsure), text(library["purpose"])});
    libraries.note(text(loaded ? library["path"] : library["reason"]));
  }
  out.print(libraries);

  Table variables({Column::text("variable").as_key(), Column::text("value").wrapping(12), Column::text("meaning").wrapping(20)},
                  "Environment variables");
  for (const Json& variable : info["environment_variables"])
    variables.add({text(variable["name"]), variable["value"].is_null() ? "not set" : "'" + text(variable["value"]) + "'", text(variable["meaning"])});
  out.print(variables);
}

}  // namespace

void add_info(CLI::App& app, int&) {
  CLI::App* command = app.add_subcommand("info", "Show the processor, memory, libraries and settings as fattn sees them");
  auto json = std::make_shared<std::string>();
  auto output = std::make_shared<OutputFlags>();
  command->add_option("--json", *json, "Write it as JSON to a file, or - for stdout")->type_name("FILE|-")->group("Output");
  output->add_to(*command);
  command->callback([json, output] {
    require_writable(*json);
    const Json info = info_json();
    Output out(*output, *json);
    if (*json != "-") print(out, info);
    if (!json->empty()) write_json(info, *json);
  });
}

}  // namespace fattn::cli
