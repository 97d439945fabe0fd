// From a request to a cubin: compiled once, whatever the number of threads and processes; errors; forks. NVRTC is a stub.
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <set>
#include <thread>

#include "jit/compile.h"
#include "jit/disk_cache.h"
#include "jit/jit.h"
#include "jit/nvrtc.h"
#include "jit/sources.h"
#include "jit_test.h"

namespace {

using namespace fattn::core::jit;
using fattn::test::CacheFolder;
using fattn::test::Child;
using fattn::test::Done;
using fattn::test::error_thrown_by;
using fattn::test::expect_contains;
using fattn::test::in_child;
using fattn::test::read_file;
using fattn::test::request;
using fattn::test::run;

const bool stubs_are_set = fattn::test::use_stubs("/nonexistent/libcuda.so.1");

TEST(JitSmallBuild, MissThenHit) {
  const CacheFolder folder;
  const Cubin first = build(request());
  EXPECT_EQ(first.origin, Origin::kNvrtc);
  EXPECT_EQ(folder.compilations(), 1u);
  EXPECT_EQ(first.resources.registers, 42);
  EXPECT_EQ(first.resources.spill_load_bytes, 8);
  const Cubin second = build(request());
  EXPECT_EQ(second.origin, Origin::kDisk);
  EXPECT_EQ(second.image, first.image);
  EXPECT_EQ(second.log, first.log);
  EXPECT_EQ(second.resources.registers, 42);
  EXPECT_EQ(folder.compilations(), 1u);
  EXPECT_EQ(build(request("other")).origin, Origin::kNvrtc);
  EXPECT_EQ(folder.files(".cubin").size(), 2u);
  forget(request());
  EXPECT_EQ(folder.files(".cubin").size(), 1u);
  EXPECT_EQ(build(request()).origin, Origin::kNvrtc);
}

TEST(JitBuild, ManyProcessesCompileOnce) {
  const CacheFolder folder;
  const std::string source = request("STUB_SLOW").source;
  std::vector<Child> children;
  for (int i = 0; i < 6; ++i) children.emplace_back(std::vector<std::string>{FATTN_JIT_BUILD_PATH, "fattn_test", "90a", source});
  std::set<std::string> images;
  int compiled = 0;
  for (Child& child : children) {
    const Done done = child.wait();
    EXPECT_EQ(done.status, 0) << done.output;
    compiled += done.output.rfind("NVRTC ", 0) == 0;
    images.insert(done.output.substr(done.output.find(' ', 5), 65));
  }
  EXPECT_EQ(compiled, 1);
  EXPECT_EQ(folder.compilations(), 1u);
  EXPECT_EQ(folder.files(".cubin").size(), 1u);
}

TEST(JitBuild, ProcessesThatWriteAndDieLeaveNothingWrong) {
  const CacheFolder folder;
  const std::string source = request("STUB_SLOW").source;
  Child first({FATTN_JIT_BUILD_PATH, "fattn_test", "90a", source});
  for (int i = 0; i < 200 && folder.compilations() == 0; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  ASSERT_EQ(kill(first.pid(), SIGKILL), 0);
  first.wait();
  const Done second = run({FATTN_JIT_BUILD_PATH, "fattn_test", "90a", source});  // the lock of the dead does not hold it up
  EXPECT_EQ(second.status, 0) << second.output;
  EXPECT_EQ(folder.compilations(), 2u);
}

TEST(JitBuild, ManyThreadsCompileOnce) {
  const CacheFolder folder;
  std::vector<std::thread> threads;
  std::string images[8];
  for (std::string& image : images) threads.emplace_back([&image] { image = build(request("STUB_SLOW")).image; });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(folder.compilations(), 1u);
  for (const std::string& image : images) EXPECT_EQ(image, images[0]);
}

TEST(JitSmallBuild, CompileErrorKeepsTheLog) {
  const CacheFolder folder;
  const Request bad = request("\n#error", "fattn_bad");
  const std::string message = error_thrown_by([&] { build(bad); });
  expect_contains(message, "compile: NVRTC 13.0 (");
  expect_contains(message, "did not compile kernel fattn_bad for sm_90a");
  expect_contains(message, "error: #error directive");
  const auto logs = folder.files(".log");
  ASSERT_EQ(logs.size(), 1u);
  expect_contains(message, logs[0].string());
  const std::string log = read_file(logs[0]);
  expect_contains(log, "1 error detected");
  expect_contains(log, bad.source);
  expect_contains(log, "--gpu-architecture=sm_90a");
  EXPECT_TRUE(folder.files(".cubin").empty());
  // The library goes on.
  EXPECT_EQ(build(request()).origin, Origin::kNvrtc);
  // Where the log cannot be kept, the message has it.
  setenv("FATTN_CACHE_DIR", "/dev/null/x", 1);
  expect_contains(error_thrown_by([&] { build(bad); }), "the log could not be kept");
  expect_contains(error_thrown_by([&] { build(bad); }), "1 error detected");
}

TEST(JitSmallBuild, TheFirstLineDescribesTheKernel) {
  const CacheFolder folder;
  Request described = request();
  described.source = "// fp16, and so on\n" + described.source;
  build(described);
  build(request());
  std::set<std::string> found;
  for (const CacheItem& item : default_disk_cache().list())
    if (item.entry) found.insert(item.entry->description);
  EXPECT_EQ(found, (std::set<std::string>{"", "fp16, and so on"}));
}

TEST(JitSmallBuild, ArchitectureThatNvrtcLacks) {
  const CacheFolder folder;
  Request r = request();
  r.arch = 70;
  const std::string message = error_thrown_by([&] { build(r); });
  expect_contains(message, "it compiles for sm_75, sm_80");
  EXPECT_EQ(folder.compilations(), 0u);
}

TEST(JitSmallBuild, CompilationIsStoppedWhenItTakesTooLong) {
  const CacheFolder folder;
  folder.settings("hang=1");
  const Compiled made = compile(nvrtc(), request(), {}, reachable(request().source, embedded_sources()), 0.05);
  expect_contains(made.problem, "it was stopped after 0.05 seconds");
}

TEST(JitSmallBuild, FirstSourceCanBeSkipped) {
  const CacheFolder folder;
  build(request());
  EXPECT_EQ(build(request(), Origin::kDisk).origin, Origin::kDisk);
  EXPECT_EQ(build(request(), Origin::kPack).origin, Origin::kNvrtc);
  EXPECT_EQ(build(request(), Origin::kNvrtc).origin, Origin::kNvrtc);
}

// In the child of a fork the cache works; what the parent was compiling at the time cannot be waited for.
TEST(JitFork, WhileAThreadCompiles) {
  const CacheFolder folder;
  build(request());
  std::thread slow([] { build(request("STUB_SLOW fork")); });
  for (int i = 0; i < 200 && folder.compilations() < 2; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(in_child([] { return std::string(name_of(build(request()).origin)); }), "disk cache");
  expect_contains(in_child([] { return error_thrown_by([] { build(request("new in the child")); }); }),
                  "it was forked while NVRTC compiled in its parent");
  slow.join();
  EXPECT_EQ(in_child([] { return std::string(name_of(build(request("new after")).origin)); }), "NVRTC");
}

}  // namespace
