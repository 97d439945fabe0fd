#include "device/cpu_info.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <memory>

#include "device/affinity.h"
#include "device/cgroup.h"
#include "device/cpu_model.h"
#include "device/text_file.h"
#include "shared/env.h"
#include "shared/text.h"

namespace fattn::core {
namespace {

int online_cpus() { return static_cast<int>(std::max(1L, ::sysconf(_SC_NPROCESSORS_ONLN))); }

CpuInfo detect() {
  CpuInfo info;
  const CpuModel model = detect_cpu_model();
  info.logical_cpus = online_cpus();
  info.vendor = model.vendor;
  info.model = model.name;
  info.isas_available = model.isas;
  info.isa_default = default_isa(model.isas, model.vendor);
  const CpuCaches told = caches_from_sysfs(""), own = caches_from_cpu();
  info.l1d_bytes = told.l1d_bytes ? told.l1d_bytes : own.l1d_bytes;
  info.l2_bytes = told.l2_bytes ? told.l2_bytes : own.l2_bytes;
  info.l3_bytes = told.l3_bytes ? told.l3_bytes : own.l3_bytes;
  return info;
}

// The detected part. No lock and no local static: a process that forks while another thread detects must not leave the
// child waiting for a thread that it does not have. Two threads may detect at once; one result stays.
struct Detected {
  std::atomic<const CpuInfo*> info{nullptr};
  ~Detected() { delete info.exchange(nullptr); }
};
constinit Detected detected;

// The quota takes several small files, some 50 us: more than a small problem. So it is read at most ten times a second.
struct Quota {
  std::atomic<int64_t> valid_until_ms{-1};
  std::atomic<double> cpus{0};
};
constinit Quota quota;

double quota_cpus() {
  using std::chrono::duration_cast, std::chrono::milliseconds, std::chrono::steady_clock;
  const int64_t now_ms = duration_cast<milliseconds>(steady_clock::now().time_since_epoch()).count();
  if (now_ms < quota.valid_until_ms.load(std::memory_order_acquire)) return quota.cpus.load(std::memory_order_relaxed);
  const double cpus = cgroup_cpus("");
  quota.cpus.store(cpus, std::memory_order_relaxed);
  quota.valid_until_ms.store(now_ms + 100, std::memory_order_release);
  return cpus;
}

// Bytes of the line "key:  123 kB" of /proc/meminfo; 0 if there is none.
int64_t meminfo_bytes(const std::string& table, std::string_view key) {
  for (std::string_view line : split(table, '\n')) {
    const size_t colon = line.find(':'), unit = line.rfind(" kB");
    if (colon == std::string_view::npos || unit == std::string_view::npos || unit < colon || line.substr(0, colon) != key) continue;
    const int64_t kib = parse_int(line.substr(colon + 1, unit - colon - 1)).value_or(0);
    return kib > 0 && kib < (int64_t{1} << 50) ? kib * 1024 : 0;
  }
  return 0;
}

std::string available_isas(const CpuInfo& cpu) {
  std::string names;
  for (Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmx, Isa::kNeon})
    if (cpu.available(isa)) names += (names.empty() ? "" : ", ") + std::string(name_of(isa));
  return names;
}

}  // namespace

const CpuInfo& detected_cpu() {
  if (const CpuInfo* info = detected.info.load(std::memory_order_acquire)) return *info;
  auto mine = std::make_unique<const CpuInfo>(detect());
  const CpuInfo* none = nullptr;
  if (detected.info.compare_exchange_strong(none, mine.get())) static_cast<void>(mine.release());  // never destroyed
  return *detected.info.load(std::memory_order_acquire);
}

int usable_cpus(int by_affinity, double by_quota) {
  const int cpus = by_affinity > 0 ? by_affinity : online_cpus();
  return by_quota < cpus ? std::max(1, static_cast<int>(std::ceil(by_quota))) : cpus;
}

int num_threads_from(const std::string& value) {
  const auto number = parse_int(value);
  if (!number || *number < 1 || *number > kMaxNumThreads)
    throw Error(ErrorCode::kInvalidArgument, text(kEnvNumThreads.name, " is '", value, "'; allowed: a whole number from 1 to ", kMaxNumThreads,
                                                  ". Correct it, or unset it to use every CPU that affinity and the control group allow"));
  return static_cast<int>(*number);
}

int usable_threads() {
  const std::string wanted = env_value(kEnvNumThreads);
  return wanted.empty() ? usable_cpus(CpuMask::current().count(), quota_cpus()) : num_threads_from(wanted);
}

CpuInfo cpu_info() {
  CpuInfo info = detected_cpu();
  info.usable_threads = usable_threads();
  return info;
}

Isa choose_isa(Isa asked, const CpuInfo& cpu) {
  Isa isa = asked;
  const char* from = "cpu_isa";
  if (isa == Isa::kAuto) {
    const std::string name = env_value(kEnvCpuIsa);
    if (!name.empty()) {
      isa = isa_from_name(name);
      from = kEnvCpuIsa.name;
    }
  }
  if (isa == Isa::kAuto) return cpu.isa_default;
  if (!cpu.available(isa))
    throw Error(ErrorCode::kUnsupported,
                text("instruction set ", name_of(isa), " (from ", from, ") cannot run on this processor; available: ", available_isas(cpu)));
  return isa;
}

void memory_info(int64_t& total_bytes, int64_t& available_bytes, const std::string& root) {
  const std::string table = read_text(root + "/proc/meminfo");
  const CgroupMemory group = cgroup_memory(root);
  total_bytes = std::min(meminfo_bytes(table, "MemTotal"), group.limit);
  available_bytes = std::min({meminfo_bytes(table, "MemAvailable"), group.free, total_bytes});
}

bool beyond_memory(size_t bytes, const std::string& root) {
  if (bytes < size_t{1} << 30) return false;
  const std::string table = read_text(root + "/proc/meminfo");
  const int64_t memory = meminfo_bytes(table, "MemTotal");
  const auto wanted = static_cast<int64_t>(std::min(bytes, size_t{1} << 62));
  return memory > 0 && wanted > std::min(memory + meminfo_bytes(table, "SwapTotal"), cgroup_memory(root).limit);
}

std::string free_memory_text() {
  int64_t total = 0, available = 0;
  memory_info(total, available);
  return total > 0 ? text(available, " of ", total, " bytes are free") : std::string("the system does not say how much is free");
}

Isa isa_from_name(const std::string& name) {
  for (Isa isa : {Isa::kAuto, Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmx, Isa::kNeon})
    if (name == name_of(isa)) return isa;
  throw Error(ErrorCode::kInvalidArgument, text("'", name, "' is no instruction set; allowed: auto, scalar, avx2, avx512, avx512_bf16, amx, neon"));
}

}  // namespace fattn::core
