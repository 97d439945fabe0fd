// Compiled kernels through the C ABI and its C++ layer. NVRTC is a stub, there is no GPU.
#include <gtest/gtest.h>

#include <cstdlib>
#include <set>
#include <stdexcept>
#include <string>

#include "fattn/cache.hpp"
#include "fattn/fattn.hpp"
#include "jit/jit.h"
#include "jit/planned.h"
#include "jit_test.h"

namespace {

namespace fs = std::filesystem;
using fattn::Error;
using fattn::test::CacheFolder;
using fattn::test::error_thrown_by;
using fattn::test::expect_contains;
using fattn::test::in_child;
using fattn::test::write_file;

const bool stub_is_set = [] {
  setenv("FATTN_NVRTC", FATTN_STUB_NVRTC_PATH, 1);
  setenv("FATTN_CUDA_DRIVER", "/nonexistent/libcuda.so.1", 1);
  return true;
}();

template <class Call>
void refused(const Call& call, const std::string& code, const std::string& words) {
  const std::string message = error_thrown_by(call);
  EXPECT_EQ(message.rfind(code, 0), 0u) << message;
  expect_contains(message, words);
}

TEST(CacheApiSmall, WarmListClear) {
  const CacheFolder folder;
  EXPECT_EQ(fattn::cache::info().path, folder.kernels());
  EXPECT_EQ(fattn::cache::info().entries, 0);
  EXPECT_TRUE(fattn::cache::list().empty());
  int32_t calls = 0, expected = 0;
  std::set<std::string> descriptions;
  const auto visit = [&](int32_t origin) {
    return [&, origin](const fattn_cache_entry& entry, int32_t index, int32_t count) {
      EXPECT_EQ(index, calls++);
      expected = count;
      EXPECT_EQ(entry.struct_size, sizeof entry);
      EXPECT_EQ(entry.origin, origin);
      EXPECT_EQ(entry.arch, 90);
      EXPECT_EQ(entry.registers, 42);
      EXPECT_EQ(entry.spill_bytes, 12);
      EXPECT_NE(entry.name[0], '\0');
      const std::string name = entry.name, description = entry.description;
      if (name == "fattn_v2_fwd" || name == "fattn_v2_bwd") expect_contains(description, ", headdim ");
      if (name.rfind("fattn_v2", 0) == 0) expect_contains(description, ", level 80");
      descriptions.insert(name + ": " + description);
    };
  };
  fattn::cache::warm(nullptr, 90, visit(FATTN_FROM_COMPILER));
  EXPECT_EQ(calls, expected);
  EXPECT_EQ(static_cast<size_t>(calls), fattn::core::jit::planned_requests(90).size());
  EXPECT_EQ(static_cast<size_t>(calls), descriptions.size()) << "no two are described alike";
  calls = 0;
  fattn::cache::warm(nullptr, 90, visit(FATTN_FROM_DISK));
  const auto all = fattn::cache::list();
  EXPECT_EQ(all.size(), static_cast<size_t>(expected));
  EXPECT_EQ(fattn::cache::info().entries, expected);
  EXPECT_GT(fattn::cache::info().bytes, 0);
  for (const fattn_cache_entry& entry : all) {
    EXPECT_STREQ(entry.damage, "");
    EXPECT_GT(entry.last_used, 0);
  }
  write_file(folder.kernels() / (std::string(64, 'a') + "-13.0.cubin"), "damaged");
  int damaged = 0;
  for (const fattn_cache_entry& entry : fattn::cache::list()) damaged += entry.damage[0] != '\0';
  EXPECT_EQ(damaged, 1);
  EXPECT_EQ(fattn::cache::clear().entries, expected + 1);
  EXPECT_TRUE(fattn::cache::list().empty());
}

TEST(CacheApiSmall, PackServesWhereThereIsNoCompiler) {
  const CacheFolder folder;
  const std::string path = folder.root() / "kernels.pack";
  int32_t count = 0;
  fattn::cache::pack(path, {}, {80, 90}, [&](const fattn_cache_entry&, int32_t, int32_t n) { count = n; });
  EXPECT_EQ(static_cast<size_t>(count), fattn::core::jit::planned_requests(80).size() + fattn::core::jit::planned_requests(90).size());
  int32_t of_all = 0, expected = 0;
  fattn::cache::pack(folder.root() / "all.pack", {}, {}, [&](const fattn_cache_entry&, int32_t, int32_t n) { of_all = n; });
  for (const int32_t arch : {75, 80, 86, 89, 90, 100, 120}) expected += static_cast<int32_t>(fattn::core::jit::planned_requests(arch).size());
  EXPECT_EQ(of_all, expected) << "no architectures are all that NVRTC compiles for";
  fattn::cache::clear();
  const std::string answer = fattn::test::in_child({{"FATTN_NVRTC", "/nonexistent"}}, [&] {
    // A process of its own would find no NVRTC; this one has opened the stub already, so it must not be asked at all.
    const size_t before = folder.compilations();
    fattn::cache::use_pack(path);
    bool all_from_pack = true;
    fattn::cache::warm(nullptr, 80,
                       [&](const fattn_cache_entry& e, int32_t, int32_t) { all_from_pack = all_from_pack && e.origin == FATTN_FROM_PACK; });
    return std::string(all_from_pack && folder.compilations() == before ? "from the pack" : "compiled");
  });
  EXPECT_EQ(answer, "from the pack");
  refused([&] { fattn::cache::use_pack("/nonexistent.pack"); }, "invalid_argument: ", "cannot be opened");
  refused([&] { fattn::cache::use_pack("relative.pack"); }, "invalid_argument: ", "relative path");
}

TEST(CacheApiSmall, BadInput) {
  const CacheFolder folder;
  refused([] { fattn::cache::warm(nullptr, 60); }, "unsupported: ", "there are no kernels for architecture 60");
  refused([] { fattn::cache::warm(nullptr, -1); }, "invalid_argument: ", "architecture -1");
  refused([] { fattn::cache::warm(nullptr, 0); }, "unsupported: ", "libcuda");  // no GPU to ask
  EXPECT_EQ(fattn_cache_pack("/tmp/x", nullptr, 0, nullptr, -1, nullptr, nullptr), FATTN_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(fattn_cache_list(nullptr, nullptr), FATTN_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(fattn_cache_query(nullptr), FATTN_ERROR_INVALID_ARGUMENT);
  fattn_cache_info info{};
  EXPECT_EQ(fattn_cache_query(&info), FATTN_ERROR_ABI);
  EXPECT_EQ(fattn_cache_use_pack(nullptr), FATTN_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(fattn_cache_pack(nullptr, nullptr, 0, nullptr, 0, nullptr, nullptr), FATTN_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(fattn_cache_clear(nullptr, nullptr), FATTN_OK);
}

TEST(CacheApiSmall, ExceptionsOfTheVisitorReachTheCaller) {
  const CacheFolder folder;
  EXPECT_THROW(fattn::cache::warm(nullptr, 90, [](const fattn_cache_entry&, int32_t, int32_t) { throw std::runtime_error("enough"); }),
               std::runtime_error);
}

TEST(CacheApiSmall, UnusableFolderSaysWhy) {
  const CacheFolder folder;
  setenv("FATTN_CACHE_DIR", "/dev/null/x", 1);
  const fattn_cache_info info = fattn::cache::info();
  EXPECT_EQ(info.usable, 0);
  expect_contains(info.reason, "/dev/null/x");
  EXPECT_NO_THROW(fattn::cache::warm(nullptr, 90));
  try {
    fattn::cache::clear();
    FAIL() << "nothing can be removed there";
  } catch (const fattn::Error& error) {
    expect_contains(error.what(), "nothing was removed");
    expect_contains(error.what(), "/dev/null/x");
  }
}

}  // namespace
