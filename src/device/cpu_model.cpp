#include "device/cpu_model.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>

#include "device/text_file.h"
#include "shared/text.h"
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace fattn::core {
namespace {

constexpr bool has(uint64_t bits, std::initializer_list<int> wanted) {
  for (int bit : wanted)
    if (((bits >> bit) & 1u) == 0) return false;
  return true;
}

// "48K", "2048K", "32M" or bytes; 0 if it is none of them.
int64_t size_of_text(std::string_view size) {
  size = trimmed(size);
  int64_t unit = 1;
  if (!size.empty() && (size.back() == 'K' || size.back() == 'M')) {
    unit = size.back() == 'K' ? 1024 : 1024 * 1024;
    size.remove_suffix(1);
  }
  const int64_t value = parse_int(size).value_or(0);
  return value > 0 && value < (int64_t{1} << 40) ? value * unit : 0;
}

// How many CPUs "0-3,8" names; 0 if it is no such list.
int64_t count_of_list(std::string_view list) {
  int64_t total = 0;
  for (std::string_view range : split(trimmed(list), ',')) {
    const auto ends = split(range, '-');
    const auto first = parse_int(ends.front()), last = parse_int(ends.back());
    if (!first || !last || ends.size() > 2 || *first < 0 || *last < *first) return 0;
    total += *last - *first + 1;
  }
  return total;
}

#if defined(__x86_64__)
struct Registers {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

// Zeros if the processor does not know the leaf.
Registers cpuid(uint32_t leaf, uint32_t subleaf) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

std::string x86_vendor() {
  const Registers r = cpuid(0, 0);
  char vendor[13] = {};
  std::memcpy(vendor, &r.ebx, 4);
  std::memcpy(vendor + 4, &r.edx, 4);
  std::memcpy(vendor + 8, &r.ecx, 4);
  return vendor;
}

std::string x86_name() {
  char name[49] = {};
  for (uint32_t i = 0; i < 3; ++i) {
    const Registers r = cpuid(0x80000002u + i, 0);
    std::memcpy(name + 16 * i, &r, sizeof r);
  }
  return std::string(trimmed(name));
}
#elif defined(__aarch64__)
// Value of the first line "key : value" of /proc/cpuinfo.
std::string cpuinfo_value(std::string_view key) {
  const std::string table = read_text("/proc/cpuinfo");
  for (std::string_view line : split(table, '\n')) {
    const size_t colon = line.find(':');
    if (colon != std::string_view::npos && trimmed(line.substr(0, colon)) == key) return std::string(trimmed(line.substr(colon + 1)));
  }
  return "";
}

// The implementer codes of the Main ID Register (Arm ARM, MIDR_EL1).
std::string arm_vendor(const std::string& implementer) {
  constexpr const char* kNames[][2] = {{"0x41", "Arm"},    {"0x42", "Broadcom"}, {"0x43", "Cavium"}, {"0x46", "Fujitsu"}, {"0x48", "HiSilicon"},
                                       {"0x4e", "NVIDIA"}, {"0x51", "Qualcomm"}, {"0x61", "Apple"},  {"0xc0", "Ampere"}};
  for (const auto& entry : kNames)
    if (implementer == entry[0]) return entry[1];
  return implementer;
}
#endif

}  // namespace

uint32_t isas_of(const X86Features& f) {
  uint32_t isas = isa_bit(Isa::kScalar);
  // Each set contains the one before it. State that the system must save: 1 SSE, 2 AVX, 5-7 AVX-512, 17-18 tiles.
  if (!has(f.xcr0, {1, 2}) || !has(f.leaf1_ecx, {12, 29}) || !has(f.leaf7_ebx, {5})) return isas;  // FMA, F16C; AVX2
  isas |= isa_bit(Isa::kAvx2);
  if (!has(f.xcr0, {5, 6, 7}) || !has(f.leaf7_ebx, {16, 17, 30, 31})) return isas;  // F, DQ, BW, VL
  isas |= isa_bit(Isa::kAvx512);
  if (!has(f.leaf7_1_eax, {5})) return isas;
  isas |= isa_bit(Isa::kAvx512Bf16);
  if (has(f.xcr0, {17, 18}) && has(f.leaf7_edx, {22, 24}) && f.tile_permission) isas |= isa_bit(Isa::kAmx);  // AMX-BF16, AMX-TILE
  return isas;
}

Isa default_isa(uint32_t isas, const std::string& vendor) {
  if (vendor != "AuthenticAMD") isas &= ~isa_bit(Isa::kAvx512Bf16);
  for (Isa isa : {Isa::kAmx, Isa::kAvx512Bf16, Isa::kAvx512, Isa::kAvx2, Isa::kNeon})
    if (isas & isa_bit(isa)) return isa;
  return Isa::kScalar;
}

CpuModel detect_cpu_model() {
  CpuModel model;
#if defined(__x86_64__)
  model.vendor = x86_vendor();
  model.name = x86_name();
  model.isas = isas_of(x86_features());
#elif defined(__aarch64__)
  model.vendor = arm_vendor(cpuinfo_value("CPU implementer"));
  model.name = text("part ", cpuinfo_value("CPU part"));
  model.isas = isa_bit(Isa::kScalar) | isa_bit(Isa::kNeon);  // part of the architecture
#else
  model.isas = isa_bit(Isa::kScalar);
#endif
  return model;
}

CpuCaches caches_from_sysfs(const std::string& root) {
  CpuCaches caches;
  const std::string cpu = root + "/sys/devices/system/cpu/cpu0";
  for (int i = 0;; ++i) {
    const std::string index = text(cpu, "/cache/index", i);
    const std::string type(trimmed(read_text(index + "/type")));
    if (type.empty()) break;
    if (type == "Instruction") continue;
    const int64_t bytes = size_of_text(read_text(index + "/size"));
    const int64_t level = parse_int(read_text(index + "/level")).value_or(0);
    if (level == 1) caches.l1d_bytes = bytes;
    if (level == 2) caches.l2_bytes = bytes;
    if (level == 3) {
      // A package may have several: one a core complex.
      std::string package = read_text(cpu + "/topology/package_cpus_list");
      if (package.empty()) package = read_text(cpu + "/topology/core_siblings_list");  // its name before Linux 5.3
      const int64_t sharing = count_of_list(read_text(index + "/shared_cpu_list"));
      caches.l3_bytes = bytes * (sharing > 0 ? std::max<int64_t>(1, count_of_list(package) / sharing) : 1);
    }
  }
  return caches;
}

CpuCaches caches_from_cpu() {
  CpuCaches caches;
#if defined(__x86_64__)
  // AMD's leaf has the layout of Intel's (AMD APM volume 3, Fn8000_001D). L3 is that of one instance: how many a package has is not told.
  const uint32_t leaf = x86_vendor() == "AuthenticAMD" ? 0x8000001Du : 4u;
  for (uint32_t i = 0; i < 16; ++i) {
    const Registers r = cpuid(leaf, i);
    const uint32_t type = r.eax & 31, level = (r.eax >> 5) & 7;
    if (type == 0) break;
    if (type == 2) continue;  // instructions
    const int64_t ways = (r.ebx >> 22) + 1, partitions = ((r.ebx >> 12) & 1023) + 1, line = (r.ebx & 4095) + 1, sets = int64_t{r.ecx} + 1;
    const int64_t bytes = ways * partitions * line * sets;
    if (level == 1) caches.l1d_bytes = bytes;
    if (level == 2) caches.l2_bytes = bytes;
    if (level == 3) caches.l3_bytes = bytes;
  }
#elif defined(_SC_LEVEL1_DCACHE_SIZE)
  caches.l1d_bytes = std::max(0L, ::sysconf(_SC_LEVEL1_DCACHE_SIZE));
  caches.l2_bytes = std::max(0L, ::sysconf(_SC_LEVEL2_CACHE_SIZE));
  caches.l3_bytes = std::max(0L, ::sysconf(_SC_LEVEL3_CACHE_SIZE));
#endif
  return caches;
}

}  // namespace fattn::core
