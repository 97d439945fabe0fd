// Compiled kernels in devices: the table, what the driver refuses, faults of the driver. Driver and NVRTC are stubs.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <new>
#include <thread>

#include "device/cuda_device.h"
#include "fattn/error.hpp"
#include "jit/build_entry.h"
#include "jit/disk_cache.h"
#include "jit/kernel_table.h"
#include "jit/pack.h"
#include "jit_test.h"
#include "stub/cuda_stub.h"

namespace {
std::atomic<int64_t> allocations{0};
}

// Not inlined: g++ takes malloc and free that it sees through new and delete for a mismatch.
__attribute__((noinline)) void* operator new(size_t bytes) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* pointer = std::malloc(bytes)) return pointer;
  throw std::bad_alloc();
}
__attribute__((noinline)) void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return std::malloc(bytes);
}
__attribute__((noinline)) void operator delete(void* pointer) noexcept { std::free(pointer); }
__attribute__((noinline)) void operator delete(void* pointer, size_t) noexcept { std::free(pointer); }

namespace {

using namespace fattn::core::jit;
using fattn::core::cuda_device;
using fattn::core::CudaDevice;
using fattn::test::CacheFolder;
using fattn::test::CudaStub;
using fattn::test::error_thrown_by;
using fattn::test::expect_contains;
using fattn::test::in_child;
using fattn::test::request;

const bool stubs_are_set = fattn::test::use_stubs(FATTN_STUB_CUDA_PATH);

const CudaStub& stub() {
  static const CudaStub loaded(FATTN_STUB_CUDA_PATH);
  return loaded;
}

struct Pod {
  uint32_t family = 7;
  uint32_t number = 0;
  uint64_t reserved[7] = {};
};

KernelKey key(uint32_t number) {
  Pod pod;
  pod.number = number;
  return key_of_pod(pod);
}
Request numbered(const KernelKey& k) {
  return request(std::to_string(pod_of_key<Pod>(k).number), "fattn_k" + std::to_string(pod_of_key<Pod>(k).number));
}
Request same(const KernelKey&) { return request(); }
Request refused(const KernelKey&) { return request("STUB_REFUSED"); }

// An undamaged entry whose image the driver does not take.
Entry refused_entry(const Request& wanted) {
  Entry entry = build_entry(wanted).entry;
  entry.image = "an image of another architecture";
  return entry;
}

TEST(JitLoadSmall, KeysAreBytes) {
  EXPECT_EQ(pod_of_key<Pod>(key(5)).number, 5u);
  EXPECT_TRUE(key(5) == key(5));
  EXPECT_FALSE(key(5) == key(6));
  EXPECT_TRUE(KernelKey{} == KernelKey{});
}

TEST(JitLoadSmall, BuiltOnceADevice) {
  const CacheFolder folder;
  KernelTable table;
  const Loaded& first = table.get(cuda_device(0), key(1), numbered);
  EXPECT_EQ(first.name, "fattn_k1");
  EXPECT_EQ(first.origin, Origin::kNvrtc);
  EXPECT_NE(first.function, nullptr);
  EXPECT_EQ(first.registers, 64);
  EXPECT_EQ(&table.get(cuda_device(0), key(1), numbered), &first);
  const Loaded& other = table.get(cuda_device(1), key(1), numbered);
  EXPECT_NE(&other, &first) << "a device of its own";
  EXPECT_EQ(other.origin, Origin::kDisk);
  EXPECT_NE(&table.get(cuda_device(0), key(2), numbered), &first);
  EXPECT_EQ(table.size(), 3u);
  EXPECT_EQ(folder.compilations(), 2u);
}

TEST(JitLoadSmall, GrowsAndKeepsReferences) {
  const CacheFolder folder;
  KernelTable table;
  std::vector<const Loaded*> seen;
  for (uint32_t i = 0; i < 1000; ++i) seen.push_back(&table.get(cuda_device(0), key(i), same));
  for (uint32_t i = 0; i < 1000; ++i) EXPECT_EQ(&table.get(cuda_device(0), key(i), same), seen[i]);
  EXPECT_EQ(table.size(), 1000u);
  EXPECT_EQ(folder.compilations(), 1u);
}

TEST(JitLoad, NumberOfKernelsIsBounded) {
  const CacheFolder folder;
  KernelTable table;
  for (uint32_t i = 0; i < KernelTable::kMaxKernels; ++i) table.get(cuda_device(0), key(i), same);
  const int64_t modules = stub().alive("modules");
  expect_contains(error_thrown_by([&] { table.get(cuda_device(0), key(1 << 20), same); }), "unsupported: this process has loaded 4096 kernels");
  EXPECT_EQ(stub().alive("modules"), modules) << "the one too many is not kept";
  EXPECT_NO_THROW(table.get(cuda_device(0), key(3), same));
}

TEST(JitLoad, HitIsCheap) {
  const CacheFolder folder;
  KernelTable table;
  CudaDevice& device = cuda_device(0);
  for (uint32_t i = 0; i < 100; ++i) table.get(device, key(i), same);
  const KernelKey wanted = key(50);
  const int64_t before = allocations.load();
  constexpr int kCalls = 1000000;
  const Loaded* seen = nullptr;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kCalls; ++i) seen = &table.get(device, wanted, same);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  EXPECT_EQ(allocations.load(), before);
  EXPECT_EQ(seen->name, "fattn_test");
  std::printf("a hit takes %.1f ns\n", seconds / kCalls * 1e9);
  EXPECT_LT(seconds / kCalls, 2e-6) << "even under a sanitizer";
}

TEST(JitLoad, ManyThreadsManyKeys) {
  const CacheFolder folder;
  KernelTable table;
  constexpr uint32_t kKeys = 60;
  const int64_t modules = stub().alive("modules");
  const Loaded* seen[8][kKeys] = {};
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 8; ++t)
    threads.emplace_back([&, t] {
      for (uint32_t i = 0; i < kKeys; ++i) {
        const uint32_t k = (i * (2 * t + 1)) % kKeys;  // each in an order of its own
        seen[t][k] = &table.get(cuda_device(0), key(k), numbered);
      }
      for (uint32_t k = 0; k < kKeys; ++k) seen[t][k] = &table.get(cuda_device(0), key(k), numbered);
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(table.size(), kKeys);
  EXPECT_EQ(folder.compilations(), kKeys);
  EXPECT_EQ(stub().alive("modules") - modules, kKeys) << "what a thread loaded in vain is unloaded";
  for (uint32_t t = 0; t < 8; ++t)
    for (uint32_t k = 0; k < kKeys; ++k) {
      EXPECT_EQ(seen[t][k], seen[0][k]);
      EXPECT_EQ(seen[t][k]->name, "fattn_k" + std::to_string(k));
    }
}

TEST(JitLoadSmall, RefusedFromTheDiskIsCompiledAnew) {
  const CacheFolder folder;
  std::string why;
  ASSERT_TRUE(default_disk_cache().store(refused_entry(request()), why)) << why;
  ASSERT_EQ(build(request()).origin, Origin::kDisk);
  KernelTable table;
  EXPECT_EQ(table.get(cuda_device(0), key(1), same).origin, Origin::kNvrtc);
  KernelTable fresh;  // as a new process
  EXPECT_EQ(fresh.get(cuda_device(0), key(1), same).origin, Origin::kDisk) << "the refused entry was replaced";
}

TEST(JitLoadSmall, RefusedFromThePackIsCompiled) {
  const CacheFolder folder;
  const Request packed = request("in the pack");
  const std::string path = folder.root() / "refused.pack";
  write_pack(path, {refused_entry(packed)});
  default_disk_cache().clear();
  add_pack(path);
  ASSERT_EQ(build(packed).origin, Origin::kPack);
  KernelTable table;
  EXPECT_EQ(table.get(cuda_device(0), key(1), [](const KernelKey&) { return request("in the pack"); }).origin, Origin::kNvrtc);
}

TEST(JitLoadSmall, RefusedFromTheDiskIsTakenFromThePack) {
  const CacheFolder folder;
  const auto wanted = [](const KernelKey&) { return request("on disk and in the pack"); };
  const Entry good = build_entry(wanted({})).entry;
  const std::string path = folder.root() / "good.pack";
  write_pack(path, {good});
  add_pack(path);
  std::string why;
  ASSERT_TRUE(default_disk_cache().store(refused_entry(wanted({})), why)) << why;
  KernelTable table;
  EXPECT_EQ(table.get(cuda_device(0), key(1), wanted).origin, Origin::kPack);
  EXPECT_TRUE(default_disk_cache().list().empty()) << "what the driver refuses is not kept";
}

TEST(JitLoadSmall, RefusedFromAllIsAnError) {
  const CacheFolder folder;
  KernelTable table;
  const std::string error = error_thrown_by([&] { table.get(cuda_device(0), key(1), refused); });
  expect_contains(error, "compile: the driver (CUDA 13.0) refuses kernel fattn_test for sm_90a on device 0");
  expect_contains(error, "from NVRTC: CUDA");
  EXPECT_EQ(table.size(), 0u);
  EXPECT_EQ(table.get(cuda_device(0), key(1), same).name, "fattn_test") << "the table goes on";
}

TEST(JitLoadSmall, CompileErrorLeavesTheTableUsable) {
  const CacheFolder folder;
  KernelTable table;
  expect_contains(error_thrown_by([&] { table.get(cuda_device(0), key(1), [](const KernelKey&) { return request("\n#error"); }); }),
                  "compile: NVRTC 13.0");
  EXPECT_EQ(table.size(), 0u);
  EXPECT_NO_THROW(table.get(cuda_device(0), key(1), same));
}

TEST(JitLoadSmall, OutOfMemoryWhileLoading) {
  const CacheFolder folder;
  KernelTable table;
  stub().fault("cuModuleLoadDataEx", 2, 1);
  expect_contains(error_thrown_by([&] { table.get(cuda_device(0), key(1), same); }), "out_of_memory: ");
  EXPECT_EQ(table.size(), 0u);
  EXPECT_EQ(table.get(cuda_device(0), key(1), same).origin, Origin::kDisk) << "the cubin was fine";
}

TEST(JitLoadSmall, FailureAfterLoadingUnloads) {
  const CacheFolder folder;
  KernelTable table;
  const int64_t modules = stub().alive("modules");
  stub().fault("cuFuncGetAttribute", 999, 1);
  EXPECT_NE(error_thrown_by([&] { table.get(cuda_device(1), key(1), same); }), "nothing was thrown");
  EXPECT_EQ(stub().alive("modules"), modules);
}

TEST(JitLoadFork, ChildGetsAClearError) {
  const CacheFolder folder;
  static KernelTable table;
  table.get(cuda_device(0), key(1), same);
  const std::string answer = in_child([] { return error_thrown_by([] { table.get(cuda_device(0), key(77), same); }); });
  expect_contains(answer, "fork");
}

}  // namespace
