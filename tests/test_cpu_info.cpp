// Processor, threads and memory: the decisions on made-up processors and made-up /proc and /sys trees, and this machine's answers.
#include "device/cpu_info.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "device/affinity.h"
#include "device/cgroup.h"
#include "device/cpu_model.h"
#include "device/text_file.h"
#include "temporary_folder.h"

namespace fattn::core {
namespace {

constexpr double kNone = std::numeric_limits<double>::infinity();

// A folder that stands for "/", removed at the end.
class Tree {
 public:
  Tree& file(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root() + path).parent_path());
    std::ofstream(root() + path, std::ios::binary) << text;
    return *this;
  }
  std::string root() const { return folder_.path().string(); }

 private:
  test::TemporaryFolder folder_;
};

const char* kV2Mounts =
    "22 28 0:20 / /proc rw,nosuid - proc proc rw\n"
    "30 22 0:26 / /sys/fs/cgroup rw,nosuid,nodev shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
const char* kV1Mounts =
    "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
    "36 31 0:33 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset\n"
    "37 31 0:34 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n";

TEST(Cgroup, NothingThereLimitsNothing) {
  Tree tree;
  EXPECT_EQ(cgroup_cpus(tree.root()), kNone);
  EXPECT_EQ(cgroup_memory(tree.root()).limit, CgroupMemory::kUnlimited);
  EXPECT_EQ(cgroup_memory(tree.root()).free, CgroupMemory::kUnlimited);
  tree.file("/proc/self/cgroup", "0::/user.slice\n");  // but no mount table
  EXPECT_EQ(cgroup_cpus(tree.root()), kNone);
}

TEST(Cgroup, V2QuotaOfTheGroupAndItsAncestors) {
  Tree tree;
  tree.file("/proc/self/mountinfo", kV2Mounts).file("/proc/self/cgroup", "0::/a.slice/b.scope\n");
  EXPECT_EQ(cgroup_cpus(tree.root()), kNone);
  tree.file("/sys/fs/cgroup/a.slice/b.scope/cpu.max", "max 100000\n");
  EXPECT_EQ(cgroup_cpus(tree.root()), kNone);
  tree.file("/sys/fs/cgroup/a.slice/cpu.max", "350000 100000\n");
  EXPECT_EQ(cgroup_cpus(tree.root()), 3.5);
  tree.file("/sys/fs/cgroup/a.slice/b.scope/cpu.max", "150000 100000\n");
  EXPECT_EQ(cgroup_cpus(tree.root()), 1.5);
  tree.file("/sys/fs/cgroup/other/cpu.max", "1000 100000\n");  // not ours
  EXPECT_EQ(cgroup_cpus(tree.root()), 1.5);
  tree.file("/sys/fs/cgroup/cpu.max", "25000 50000\n");  // a container's own root
  EXPECT_EQ(cgroup_cpus(tree.root()), 0.5);
}

TEST(Cgroup, V1Quota) {
  Tree tree;
  tree.file("/proc/self/mountinfo", kV1Mounts).file("/proc/self/cgroup", "8:pids:/x\n3:cpuset:/y\n2:cpu,cpuacct:/docker/0123\n1:name=systemd:/cpu\n");
  tree.file("/sys/fs/cgroup/cpu,cpuacct/docker/0123/cpu.cfs_quota_us", "-1\n")
      .file("/sys/fs/cgroup/cpu,cpuacct/docker/0123/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cgroup_cpus(tree.root()), kNone);
  tree.file("/sys/fs/cgroup/cpu,cpuacct/docker/0123/cpu.cfs_quota_us", "220000\n");
  EXPECT_EQ(cgroup_cpus(tree.root()), 2.2);
  tree.file("/sys/fs/cgroup/cpu,cpuacct/docker/cpu.cfs_quota_us", "50000\n").file("/sys/fs/cgroup/cpu,cpuacct/docker/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cgroup_cpus(tree.root()), 0.5);
}

TEST(Cgroup, V1AndV2Together) {
  Tree tree;
  tree.file("/proc/self/mountinfo", std::string(kV1Mounts) + "38 31 0:35 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n");
  tree.file("/proc/self/cgroup", "4:memory:/m/n\n2:cpu,cpuacct:/\n0::/u\n");
  tree.file("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "400000").file("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000");
  EXPECT_EQ(cgroup_cpus(tree.root()), 4.0);
  tree.file("/sys/fs/cgroup/unified/u/cpu.max", "300000 100000");
  EXPECT_EQ(cgroup_cpus(tree.root()), 3.0);
}

TEST(Cgroup, AMountThatShowsOnlyTheContainersGroup) {
  Tree tree;
  // The group's path is told from the host's root, the mount begins at the container's group.
  tree.file("/proc/self/mountinfo", "32 31 0:29 /docker/ab /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n")
      .file("/proc/self/cgroup", "2:cpu:/docker/ab/job\n");
  tree.file("/sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "300000").file("/sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000");
  EXPECT_EQ(cgroup_cpus(tree.root()), 3.0);
  tree.file("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "200000").file("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000");
  EXPECT_EQ(cgroup_cpus(tree.root()), 2.0);
  // A name that only begins alike is another group.
  tree.file("/proc/self/cgroup", "2:cpu:/docker/abc\n");
  EXPECT_EQ(cgroup_cpus(tree.root()), 2.0);
  // Outside of the namespace: what the mount shows is all there is, and no path leads out of it.
  tree.file("/proc/self/cgroup", "2:cpu:/../../etc\n").file("/sys/fs/etc/cpu.cfs_quota_us", "100000").file("/sys/fs/etc/cpu.cfs_period_us", "100000");
  EXPECT_EQ(cgroup_cpus(tree.root()), 2.0);
}

TEST(Cgroup, OddNames) {
  Tree tree;
  tree.file("/proc/self/mountinfo", "30 22 0:26 / /sys/my\\040groups rw - cgroup2 cgroup2 rw\n").file("/proc/self/cgroup", "0::/a:b/c d\n");
  tree.file("/sys/my groups/a:b/c d/cpu.max", "100000 100000\n");
  EXPECT_EQ(cgroup_cpus(tree.root()), 1.0);
}

TEST(Cgroup, GarbageLimitsNothing) {
  const char* garbage[] = {"",
                           "\n",
                           "max",
                           "100000",
                           "-5 100000",
                           "100000 0",
                           "0 100000",
                           "x y z",
                           "1e5 1e5",
                           "100000 -1",
                           "99999999999999999999 100000",
                           "100000 100000 7",
                           "\xff\xfe\x00garbage"};
  for (const char* text : garbage) {
    Tree tree;
    tree.file("/proc/self/mountinfo", kV2Mounts).file("/proc/self/cgroup", "0::/g\n").file("/sys/fs/cgroup/g/cpu.max", text);
    tree.file("/sys/fs/cgroup/g/memory.max", text == std::string("100000") ? "1.5G" : text);
    EXPECT_EQ(cgroup_cpus(tree.root()), kNone) << text;
    EXPECT_EQ(cgroup_memory(tree.root()).limit, CgroupMemory::kUnlimited) << text;
    Tree tables;
    tables.file("/proc/self/mountinfo", text).file("/proc/self/cgroup", text);
    EXPECT_EQ(cgroup_cpus(tables.root()), kNone) << text;
  }
  Tree torn;
  torn.file("/proc/self/mountinfo", "30 22 - cgroup2\n - \n1 2 3 4 5 -\n" + std::string(kV2Mounts) + "9 - cgroup")
      .file("/proc/self/cgroup", ":\n::\n0:\n0::/g");
  torn.file("/sys/fs/cgroup/g/cpu.max", "200000 100000");
  EXPECT_EQ(cgroup_cpus(torn.root()), 2.0);
}

TEST(Memory, FromTheSystemAndTheGroup) {
  Tree tree;
  int64_t total = -1, available = -1;
  memory_info(total, available, tree.root());
  EXPECT_EQ(total, 0);
  EXPECT_EQ(available, 0);
  tree.file("/proc/meminfo", "MemTotal:       1000000 kB\nMemFree:         100 kB\nMemAvailable:    600000 kB\n");
  memory_info(total, available, tree.root());
  EXPECT_EQ(total, 1024000000);
  EXPECT_EQ(available, 614400000);
  tree.file("/proc/self/mountinfo", kV2Mounts).file("/proc/self/cgroup", "0::/g\n").file("/sys/fs/cgroup/g/memory.max", "max\n");
  memory_info(total, available, tree.root());
  EXPECT_EQ(total, 1024000000);
  tree.file("/sys/fs/cgroup/g/memory.max", "500000000\n").file("/sys/fs/cgroup/g/memory.current", "300000000\n");
  memory_info(total, available, tree.root());
  EXPECT_EQ(total, 500000000);
  EXPECT_EQ(available, 200000000);
  // File cache that can go counts as free; usage beyond the limit leaves nothing.
  tree.file("/sys/fs/cgroup/g/memory.stat", "anon 5\ninactive_file 50000000\nactive_file 7\n");
  memory_info(total, available, tree.root());
  EXPECT_EQ(available, 250000000);
  tree.file("/sys/fs/cgroup/g/memory.current", "700000000\n");
  memory_info(total, available, tree.root());
  EXPECT_EQ(available, 0);
}

TEST(Memory, V1) {
  Tree tree;
  tree.file("/proc/meminfo", "MemTotal: 1000000 kB\nMemAvailable: 900000 kB\n").file("/proc/self/mountinfo", kV1Mounts);
  tree.file("/proc/self/cgroup", "4:memory:/m/n\n").file("/sys/fs/cgroup/memory/m/n/memory.limit_in_bytes", "9223372036854771712\n");
  tree.file("/sys/fs/cgroup/memory/m/n/memory.usage_in_bytes", "1000\n");
  int64_t total = -1, available = -1;
  memory_info(total, available, tree.root());
  EXPECT_EQ(total, 1024000000);
  EXPECT_EQ(available, 921600000);
  tree.file("/sys/fs/cgroup/memory/m/memory.limit_in_bytes", "100000000\n").file("/sys/fs/cgroup/memory/m/memory.usage_in_bytes", "40000000\n");
  tree.file("/sys/fs/cgroup/memory/m/memory.stat", "cache 9\ntotal_inactive_file 10000000\n");
  memory_info(total, available, tree.root());
  EXPECT_EQ(total, 100000000);
  EXPECT_EQ(available, 70000000);
}

// What a system that promises any amount of memory would give, and then kill the process for.
TEST(Memory, Beyond) {
  constexpr size_t kGiB = size_t{1} << 30;
  Tree tree;
  EXPECT_FALSE(beyond_memory(size_t{1} << 63, tree.root())) << "a system that says nothing";
  tree.file("/proc/meminfo", "MemTotal: 4194304 kB\nMemAvailable: 100 kB\nSwapTotal: 2097152 kB\n");
  EXPECT_FALSE(beyond_memory(6 * kGiB, tree.root()));
  EXPECT_TRUE(beyond_memory(6 * kGiB + 1, tree.root()));
  EXPECT_TRUE(beyond_memory(SIZE_MAX, tree.root()));
  tree.file("/proc/self/mountinfo", kV2Mounts).file("/proc/self/cgroup", "0::/g\n").file("/sys/fs/cgroup/g/memory.max", "3221225472\n");
  EXPECT_FALSE(beyond_memory(3 * kGiB, tree.root()));
  EXPECT_TRUE(beyond_memory(3 * kGiB + 1, tree.root()));
  EXPECT_FALSE(beyond_memory(kGiB - 1, tree.root()));
}

TEST(UsableCpus, QuotaRoundsUpAndIsAtLeastOne) {
  EXPECT_EQ(usable_cpus(8, kNone), 8);
  EXPECT_EQ(usable_cpus(8, 3.0), 3);
  EXPECT_EQ(usable_cpus(8, 3.1), 4);
  EXPECT_EQ(usable_cpus(8, 7.5), 8);
  EXPECT_EQ(usable_cpus(8, 0.05), 1);
  EXPECT_EQ(usable_cpus(2, 64.0), 2);
  EXPECT_GE(usable_cpus(0, kNone), 1);  // affinity unknown: the CPUs that are online
}

// Sets a variable for a scope.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    ::setenv(name, value, 1);
  }
  ~Variable() {
    if (before_.empty())
      ::unsetenv(name_);
    else
      ::setenv(name_, before_.c_str(), 1);
  }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
  std::string before_;
};

TEST(NumThreads, TheVariableGivesTheDefault) {
  for (int threads : {1, 3, 1024}) {
    const Variable set("FATTN_NUM_THREADS", std::to_string(threads).c_str());
    EXPECT_EQ(cpu_info().usable_threads, threads);
  }
  const Variable empty("FATTN_NUM_THREADS", "");
  EXPECT_GE(cpu_info().usable_threads, 1);
}

TEST(NumThreads, InvalidValuesAreNamed) {
  for (const char* value : {"0", "-1", "1025", "two", "2.5", "4x", " ", "0x4", "99999999999999999999", "+4"}) {
    const Variable set("FATTN_NUM_THREADS", value);
    try {
      cpu_info();
      ADD_FAILURE() << value;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
      const std::string what = e.what();
      EXPECT_NE(what.find("FATTN_NUM_THREADS is '" + std::string(value) + "'"), std::string::npos) << what;
      EXPECT_NE(what.find("from 1 to 1024"), std::string::npos) << what;
    }
  }
}

TEST(Affinity, CountsWhatTheThreadMayUse) {
  std::thread([] {
    const CpuMask before = CpuMask::current();
    ASSERT_TRUE(before.known());
    const CpuMask one = CpuMask::of({::sched_getcpu()});
    ASSERT_TRUE(one.apply());
    EXPECT_EQ(CpuMask::current().count(), 1);
    const Variable unset("FATTN_NUM_THREADS", "");
    EXPECT_EQ(cpu_info().usable_threads, 1);
    ASSERT_TRUE(before.apply());
    EXPECT_TRUE(CpuMask::current() == before);
  }).join();
}

TEST(Affinity, MadeUpSets) {
  EXPECT_EQ(CpuMask::of({0, 5, 63, 64, 1000, 5}).count(), 5);
  EXPECT_FALSE(CpuMask::of({}).known());
  EXPECT_FALSE(CpuMask::of({-1}).known());
  EXPECT_FALSE(CpuMask::of({8192}).known());
  EXPECT_EQ(CpuMask::of({8191}).count(), 1);
  EXPECT_EQ(CpuMask().count(), 0);
  EXPECT_TRUE(CpuMask::of({1, 2}) == CpuMask::of({2, 1}));
  EXPECT_TRUE(CpuMask::of({1}) != CpuMask::of({2}));
}

// Processors as CPUID describes them.
X86Features haswell() {
  X86Features f;
  f.leaf1_ecx = 1u << 12 | 1u << 27 | 1u << 29;
  f.leaf7_ebx = 1u << 5;
  f.xcr0 = 0x7;
  return f;
}
X86Features skylake_x() {
  X86Features f = haswell();
  f.leaf7_ebx |= 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
  f.xcr0 = 0xe7;
  return f;
}
X86Features zen4() {
  X86Features f = skylake_x();
  f.leaf7_1_eax = 1u << 5;
  return f;
}
X86Features sapphire_rapids() {
  X86Features f = zen4();
  f.leaf7_edx = 1u << 22 | 1u << 24;
  f.xcr0 = 0x600e7;
  f.tile_permission = true;
  return f;
}

constexpr uint32_t kScalarOnly = isa_bit(Isa::kScalar), kUpToAvx2 = kScalarOnly | isa_bit(Isa::kAvx2),
                   kUpToAvx512 = kUpToAvx2 | isa_bit(Isa::kAvx512), kUpToBf16 = kUpToAvx512 | isa_bit(Isa::kAvx512Bf16),
                   kUpToAmx = kUpToBf16 | isa_bit(Isa::kAmx);

TEST(Isas, OfKnownProcessors) {
  EXPECT_EQ(isas_of(X86Features{}), kScalarOnly);
  EXPECT_EQ(isas_of(haswell()), kUpToAvx2);
  EXPECT_EQ(isas_of(skylake_x()), kUpToAvx512);
  EXPECT_EQ(isas_of(zen4()), kUpToBf16);
  EXPECT_EQ(isas_of(sapphire_rapids()), kUpToAmx);
}

TEST(Isas, TheSystemMustSaveTheRegisters) {
  X86Features f = sapphire_rapids();
  f.xcr0 = 0;
  EXPECT_EQ(isas_of(f), kScalarOnly);
  f.xcr0 = 0x3;
  EXPECT_EQ(isas_of(f), kScalarOnly);
  f.xcr0 = 0x7;
  EXPECT_EQ(isas_of(f), kUpToAvx2);
  f.xcr0 = 0x67;
  EXPECT_EQ(isas_of(f), kUpToAvx2);
  f.xcr0 = 0xe7;
  EXPECT_EQ(isas_of(f), kUpToBf16);
  f.xcr0 = 0x200e7;
  EXPECT_EQ(isas_of(f), kUpToBf16);
  f.xcr0 = 0x600e7;
  f.tile_permission = false;
  EXPECT_EQ(isas_of(f), kUpToBf16);
}

TEST(Isas, EveryBitCounts) {
  const auto without = [](uint32_t X86Features::*word, int bit) {
    X86Features f = sapphire_rapids();
    f.*word &= ~(1u << bit);
    return isas_of(f);
  };
  for (int bit : {12, 29}) EXPECT_EQ(without(&X86Features::leaf1_ecx, bit), kScalarOnly) << bit;
  EXPECT_EQ(without(&X86Features::leaf7_ebx, 5), kScalarOnly);
  for (int bit : {16, 17, 30, 31}) EXPECT_EQ(without(&X86Features::leaf7_ebx, bit), kUpToAvx2) << bit;
  EXPECT_EQ(without(&X86Features::leaf7_1_eax, 5), kUpToAvx512);
  for (int bit : {22, 24}) EXPECT_EQ(without(&X86Features::leaf7_edx, bit), kUpToBf16) << bit;
}

TEST(Isas, Default) {
  EXPECT_EQ(default_isa(kUpToAmx, "GenuineIntel"), Isa::kAmx);
  EXPECT_EQ(default_isa(kUpToBf16, "GenuineIntel"), Isa::kAvx512);
  EXPECT_EQ(default_isa(kUpToBf16, "AuthenticAMD"), Isa::kAvx512Bf16);
  EXPECT_EQ(default_isa(kUpToAvx512, "GenuineIntel"), Isa::kAvx512);
  EXPECT_EQ(default_isa(kUpToAvx512, "AuthenticAMD"), Isa::kAvx512);
  EXPECT_EQ(default_isa(kUpToAvx2, "AuthenticAMD"), Isa::kAvx2);
  EXPECT_EQ(default_isa(kScalarOnly, ""), Isa::kScalar);
  EXPECT_EQ(default_isa(kScalarOnly | isa_bit(Isa::kNeon), "Arm"), Isa::kNeon);
}

TEST(Isas, Names) {
  for (Isa isa : {Isa::kAuto, Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmx, Isa::kNeon})
    EXPECT_EQ(isa_from_name(name_of(isa)), isa);
  for (const char* name : {"", "AVX2", "avx-512", "sse"}) {
    try {
      isa_from_name(name);
      ADD_FAILURE() << name;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
      EXPECT_NE(std::string(e.what()).find("avx512_bf16"), std::string::npos);
    }
  }
}

void cache(Tree& tree, int index, const char* level, const char* type, const char* size, const char* shared) {
  const std::string folder = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index);
  tree.file(folder + "/level", level).file(folder + "/type", type).file(folder + "/size", size).file(folder + "/shared_cpu_list", shared);
}

TEST(Caches, FromSysfs) {
  Tree tree;
  EXPECT_EQ(caches_from_sysfs(tree.root()).l1d_bytes, 0);
  cache(tree, 0, "1\n", "Data\n", "48K\n", "0,32\n");
  cache(tree, 1, "1\n", "Instruction\n", "32K\n", "0,32\n");
  cache(tree, 2, "2\n", "Unified\n", "1024K\n", "0,32\n");
  cache(tree, 3, "3\n", "Unified\n", "32M\n", "0-7,32-39\n");
  CpuCaches caches = caches_from_sysfs(tree.root());
  EXPECT_EQ(caches.l1d_bytes, 48 * 1024);
  EXPECT_EQ(caches.l2_bytes, 1024 * 1024);
  EXPECT_EQ(caches.l3_bytes, 32 << 20);
  tree.file("/sys/devices/system/cpu/cpu0/topology/core_siblings_list", "0-63\n");
  EXPECT_EQ(caches_from_sysfs(tree.root()).l3_bytes, 4 * (32 << 20));  // four core complexes
  tree.file("/sys/devices/system/cpu/cpu0/topology/package_cpus_list", "0-15,32-47\n");
  EXPECT_EQ(caches_from_sysfs(tree.root()).l3_bytes, 2 * (32 << 20));
}

TEST(Caches, GarbageIsUnknown) {
  for (const char* text : {"", "K", "12Q", "-4K", "99999999999999999999K", "4 K K", "max"}) {
    Tree tree;
    cache(tree, 0, "1", "Data", text, "0");
    cache(tree, 1, text, "Unified", "64K", "0");
    cache(tree, 2, "3", "Unified", "64K", text);
    tree.file("/sys/devices/system/cpu/cpu0/topology/package_cpus_list", text);
    const CpuCaches caches = caches_from_sysfs(tree.root());
    EXPECT_EQ(caches.l1d_bytes, 0) << text;
    EXPECT_EQ(caches.l2_bytes, 0) << text;
    EXPECT_EQ(caches.l3_bytes, 64 * 1024) << text;
  }
}

TEST(Caches, TheProcessorAgreesWithTheSystem) {
  const CpuCaches told = caches_from_sysfs(""), own = caches_from_cpu();
  if (!told.l1d_bytes || !own.l1d_bytes) GTEST_SKIP() << "one of them does not say";
  EXPECT_EQ(told.l1d_bytes, own.l1d_bytes);
  EXPECT_EQ(told.l2_bytes, own.l2_bytes);
}

// The kernel's own list of this processor's features.
bool kernel_says(const std::string& flag) {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line))
    if (line.rfind("flags", 0) == 0) return (line + " ").find(" " + flag + " ") != std::string::npos;
  return false;
}

TEST(CpuInfo, OfThisMachine) {
  const CpuInfo info = cpu_info();
  EXPECT_FALSE(info.vendor.empty());
  EXPECT_FALSE(info.model.empty());
  EXPECT_GE(info.logical_cpus, 1);
  EXPECT_TRUE(info.available(Isa::kScalar));
  EXPECT_TRUE(info.available(info.isa_default));
#if defined(__x86_64__)
  EXPECT_EQ(info.available(Isa::kAvx2), kernel_says("avx2") && kernel_says("fma") && kernel_says("f16c"));
  EXPECT_EQ(info.available(Isa::kAvx512), kernel_says("avx512f") && kernel_says("avx512bw") && kernel_says("avx512vl") && kernel_says("avx512dq"));
  EXPECT_EQ(info.available(Isa::kAvx512Bf16), kernel_says("avx512_bf16"));
  EXPECT_EQ(info.available(Isa::kAmx), kernel_says("amx_tile") && kernel_says("amx_bf16") && kernel_says("avx512_bf16"));
#endif
  int64_t total = 0, available = 0;
  memory_info(total, available);
  EXPECT_GT(total, 0);
  EXPECT_GT(available, 0);
  EXPECT_LE(available, total);
}

TEST(CpuInfo, ManyThreadsAskAtOnce) {
  std::vector<std::thread> threads;
  std::vector<CpuInfo> infos(8);
  for (CpuInfo& info : infos)
    threads.emplace_back([&info] {
      for (int i = 0; i < 50; ++i) info = cpu_info();
    });
  for (auto& thread : threads) thread.join();
  for (const CpuInfo& info : infos) {
    EXPECT_EQ(info.model, infos[0].model);
    EXPECT_EQ(info.isas_available, infos[0].isas_available);
    EXPECT_EQ(info.usable_threads, infos[0].usable_threads);
  }
}

}  // namespace
}  // namespace fattn::core
