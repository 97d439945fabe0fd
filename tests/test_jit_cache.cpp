// The disk cache and everything that can be wrong with it. NVRTC is a stub (stub/nvrtc_stub.cpp).
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>

#include "jit/disk_cache.h"
#include "jit/entry.h"
#include "jit/jit.h"
#include "jit_test.h"

namespace {

namespace fs = std::filesystem;
using namespace fattn::core::jit;
using fattn::test::CacheFolder;
using fattn::test::expect_contains;
using fattn::test::in_child;
using fattn::test::read_file;
using fattn::test::request;
using fattn::test::some_entry;
using fattn::test::write_file;

const bool stubs_are_set = fattn::test::use_stubs("/nonexistent/libcuda.so.1");

TEST(JitSmallEntry, RoundTripAndEveryDamage) {
  const Entry entry = some_entry(7, 50);
  const std::string bytes = encode(entry);
  std::string why;
  const auto back = decode(bytes, why);
  ASSERT_TRUE(back) << why;
  EXPECT_EQ(back->key, entry.key);
  EXPECT_EQ(back->image, entry.image);
  EXPECT_EQ(back->log, entry.log);
  EXPECT_EQ(back->name, entry.name);
  EXPECT_EQ(back->description, entry.description);
  EXPECT_EQ(back->arch, 90);
  EXPECT_TRUE(back->arch_specific);
  EXPECT_TRUE(back->version == entry.version);
  EXPECT_EQ(back->resources.registers, 7);
  EXPECT_EQ(back->seconds, 0.25);
  for (size_t size = 0; size < bytes.size(); ++size) EXPECT_FALSE(decode(std::string_view(bytes).substr(0, size), why)) << size;
  for (size_t at = 0; at < bytes.size(); ++at) {
    std::string damaged = bytes;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x10);
    EXPECT_FALSE(decode(damaged, why)) << at;
  }
  EXPECT_FALSE(decode(bytes + "x", why));
}

TEST(JitSmallCache, FolderAndFilesArePrivate) {
  const CacheFolder folder;
  const mode_t before = umask(0);
  build(request());
  umask(before);
  struct stat info {};
  ASSERT_EQ(stat(folder.kernels().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0700u);
  ASSERT_EQ(stat(folder.entry().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0600u);
  EXPECT_TRUE(folder.files(".new").empty());
}

TEST(JitSmallCache, DamagedEntriesAreRebuilt) {
  const CacheFolder folder;
  const std::string image = build(request()).image;
  const fs::path entry = folder.entry();
  const std::string bytes = read_file(entry);
  size_t compilations = 1;
  const auto rebuilt = [&](const std::string& damaged) {
    write_file(entry, damaged);
    const Cubin cubin = build(request());
    EXPECT_EQ(cubin.origin, Origin::kNvrtc);
    EXPECT_EQ(cubin.image, image);
    EXPECT_EQ(folder.compilations(), ++compilations);
    EXPECT_EQ(build(request()).origin, Origin::kDisk);
  };
  rebuilt("");
  rebuilt(bytes.substr(0, bytes.size() / 2));
  rebuilt(bytes.substr(0, bytes.size() - 1));
  rebuilt(bytes + "x");
  std::string flipped = bytes;
  flipped[bytes.size() - 5] ^= 1;
  rebuilt(flipped);
  // A whole entry, but another kernel's.
  build(request("other"));
  ++compilations;
  for (const fs::path& path : folder.files(".cubin"))
    if (path != entry) rebuilt(read_file(path));
}

TEST(JitSmallCache, LinksAndForeignFilesAreNotRead) {
  const CacheFolder folder;
  build(request());
  const fs::path entry = folder.entry(), elsewhere = folder.root() / "elsewhere";
  const auto not_read = [&](const char* what) {
    EXPECT_EQ(build(request()).origin, Origin::kNvrtc) << what;
    EXPECT_EQ(build(request()).origin, Origin::kDisk) << what;
    EXPECT_TRUE(fs::is_regular_file(fs::symlink_status(entry))) << what;
  };
  fs::rename(entry, elsewhere);
  fs::create_symlink(elsewhere, entry);
  not_read("symbolic link");
  EXPECT_TRUE(fs::exists(elsewhere)) << "a link is replaced, not followed";
  fs::remove(entry);
  fs::create_hard_link(elsewhere, entry);
  not_read("hard link");
  fs::remove(entry);
  ASSERT_EQ(mkfifo(entry.c_str(), 0600), 0);
  not_read("pipe");
  fs::permissions(entry, fs::perms(0666));
  not_read("writable by all");
  if (geteuid() == 0) {
    ASSERT_EQ(chown(entry.c_str(), 65534, 65534), 0);
    not_read("another user's");
  }
}

TEST(JitSmallCache, FoldersThatAreNotOursAreNotUsed) {
  const CacheFolder folder;
  const auto unused = [&](const char* what, const std::string& reason) {
    const size_t before = folder.compilations();
    EXPECT_EQ(build(request()).origin, Origin::kNvrtc) << what;
    EXPECT_EQ(build(request()).origin, Origin::kNvrtc) << what;
    EXPECT_EQ(folder.compilations(), before + 2) << what;
    expect_contains(default_disk_cache().problem(), reason);
  };
  fs::create_directory(folder.root() / "target");
  fs::permissions(folder.root() / "target", fs::perms(0700));
  fs::create_symlink(folder.root() / "target", folder.kernels());
  unused("link", "it is a link or no folder");
  EXPECT_TRUE(fs::is_empty(folder.root() / "target"));
  fs::remove(folder.kernels());
  write_file(folder.kernels(), "a file");
  unused("file", "it is a link or no folder");
  fs::remove(folder.kernels());
  fs::create_directory(folder.kernels());
  fs::permissions(folder.kernels(), fs::perms(0755));
  unused("open to others", "open to other users");
  fs::permissions(folder.kernels(), fs::perms(0700));
  if (geteuid() == 0) {
    ASSERT_EQ(chown(folder.kernels().c_str(), 65534, 65534), 0);
    unused("another user's", "belongs to user 65534");
    ASSERT_EQ(chown(folder.kernels().c_str(), 0, 0), 0);
  }
  EXPECT_EQ(default_disk_cache().problem(), "");
  EXPECT_EQ(build(request()).origin, Origin::kNvrtc);
  EXPECT_EQ(build(request()).origin, Origin::kDisk);
}

TEST(JitSmallCache, CacheThatCannotBeWrittenIsNoError) {
  const CacheFolder folder;
  for (const char* impossible : {"/dev/null/x", "/proc/fattn", "relative/folder"}) {
    setenv("FATTN_CACHE_DIR", impossible, 1);
    EXPECT_EQ(build(request()).origin, Origin::kNvrtc) << impossible;
    EXPECT_NE(default_disk_cache().problem(), "") << impossible;
    EXPECT_TRUE(default_disk_cache().list().empty());
  }
  if (geteuid() != 0) return;
  // As a user who may not write.
  setenv("FATTN_CACHE_DIR", folder.root().c_str(), 1);
  const std::string answer = in_child([&] {
    if (setgid(65534) != 0 || setuid(65534) != 0) return std::string("cannot change the user");
    return std::string(name_of(build(request()).origin)) + ": " + default_disk_cache().problem();
  });
  expect_contains(answer, "NVRTC: the folder ");
  expect_contains(answer, "Permission denied");
}

TEST(JitSmallCache, NoHomeIsNoError) {
  const CacheFolder folder;
  const std::string answer = in_child([] {
    unsetenv("FATTN_CACHE_DIR");
    unsetenv("XDG_CACHE_HOME");
    setenv("HOME", "/dev/null", 1);  // not even root can make a folder there
    return std::string(name_of(build(request()).origin)) + " " + name_of(build(request()).origin);
  });
  EXPECT_EQ(answer, "NVRTC NVRTC");
}

TEST(JitSmallCache, FolderFollowsTheVariables) {
  const CacheFolder folder;
  EXPECT_EQ(default_disk_cache().folder(), folder.kernels());
  EXPECT_EQ(in_child([] {
              unsetenv("FATTN_CACHE_DIR");
              setenv("XDG_CACHE_HOME", "/xdg", 1);
              return default_disk_cache().folder();
            }),
            "/xdg/fattn/kernels");
  EXPECT_EQ(in_child([] {
              unsetenv("FATTN_CACHE_DIR");
              setenv("XDG_CACHE_HOME", "relative", 1);
              setenv("HOME", "/home/x", 1);
              return default_disk_cache().folder();
            }),
            "/home/x/.cache/fattn/kernels");
}

TEST(JitSmallCache, EvictsWhatWasUsedLongestAgo) {
  const CacheFolder folder;
  const int64_t each = static_cast<int64_t>(encode(some_entry(1, 10000)).size());
  const DiskCache cache(folder.kernels(), "", 5 * each + each / 2);
  std::string why;
  const auto age = [&](uint8_t number, int seconds) {
    const timeval then[2] = {{time(nullptr) - seconds, 0}, {time(nullptr) - seconds, 0}};
    const std::string path = folder.kernels() / entry_file_name(some_entry(number).key, {13, 0});
    ASSERT_EQ(utimes(path.c_str(), then), 0);
  };
  for (uint8_t i = 1; i <= 5; ++i) {
    ASSERT_TRUE(cache.store(some_entry(i, 10000), why)) << why;
    age(i, 1000 - i);  // 1 is the oldest
  }
  EXPECT_EQ(cache.use().entries, 5);
  EXPECT_TRUE(cache.load(some_entry(1).key, NvrtcVersion{13, 0}));  // used now
  ASSERT_TRUE(cache.store(some_entry(6, 10000), why)) << why;
  EXPECT_LE(cache.use().bytes, cache.limit_bytes());
  EXPECT_TRUE(cache.load(some_entry(1).key, NvrtcVersion{13, 0})) << "it was used last";
  EXPECT_TRUE(cache.load(some_entry(6).key, NvrtcVersion{13, 0})) << "it is the new one";
  EXPECT_FALSE(cache.load(some_entry(2).key, NvrtcVersion{13, 0})) << "it was used longest ago";
  EXPECT_FALSE(cache.store(some_entry(9, 10 * static_cast<size_t>(each)), why)) << "larger than the cache";
  expect_contains(why, "at most");
}

TEST(JitSmallCache, TemporaryFilesOfTheDeadAreRemoved) {
  const CacheFolder folder;
  const DiskCache cache(folder.kernels());
  std::string why;
  ASSERT_TRUE(cache.store(some_entry(1), why));
  write_file(folder.kernels() / ".new-1-old", "x");
  write_file(folder.kernels() / ".new-1-fresh", "x");
  const timeval then[2] = {{time(nullptr) - 7200, 0}, {time(nullptr) - 7200, 0}};
  ASSERT_EQ(utimes((folder.kernels() / ".new-1-old").c_str(), then), 0);
  ASSERT_TRUE(cache.store(some_entry(2), why));
  EXPECT_FALSE(fs::exists(folder.kernels() / ".new-1-old"));
  EXPECT_TRUE(fs::exists(folder.kernels() / ".new-1-fresh")) << "somebody may be writing it";
}

TEST(JitSmallCache, ListAndClear) {
  const CacheFolder folder;
  const DiskCache cache(folder.kernels());
  EXPECT_TRUE(cache.list().empty());
  std::string why;
  ASSERT_TRUE(cache.store(some_entry(1), why));
  ASSERT_TRUE(cache.store(some_entry(2), why));
  write_file(folder.kernels() / entry_file_name(sha256("damaged"), {13, 0}), "damaged");
  const auto items = cache.list();
  ASSERT_EQ(items.size(), 3u);
  EXPECT_EQ(std::count_if(items.begin(), items.end(), [](const CacheItem& i) { return i.entry.has_value(); }), 2);
  for (const CacheItem& item : items) EXPECT_EQ(item.entry.has_value(), item.why.empty());
  EXPECT_EQ(cache.clear().entries, 3);
  EXPECT_TRUE(cache.list().empty());
  EXPECT_EQ(cache.clear().entries, 0);
}

TEST(JitSmallCache, AnyVersionServesWhereThereIsNoNvrtc) {
  const CacheFolder folder;
  const DiskCache cache(folder.kernels());
  std::string why;
  Entry entry = some_entry(1);
  for (const NvrtcVersion version : {NvrtcVersion{12, 9}, NvrtcVersion{13, 1}, NvrtcVersion{13, 0}}) {
    entry.version = version;
    ASSERT_TRUE(cache.store(entry, why));
  }
  EXPECT_FALSE(cache.load(entry.key, NvrtcVersion{12, 0}));
  EXPECT_TRUE(cache.load(entry.key, NvrtcVersion{12, 9})->version == (NvrtcVersion{12, 9}));
  EXPECT_TRUE(cache.load(entry.key, std::nullopt)->version == (NvrtcVersion{13, 1}));
  cache.remove(entry.key);
  EXPECT_FALSE(cache.load(entry.key, std::nullopt));
}

TEST(JitSmallCache, WhatCannotBeReadNowStays) {
  const CacheFolder folder;
  const DiskCache cache(folder.kernels());
  const Entry entry = some_entry(1);
  std::string why;
  ASSERT_TRUE(cache.store(entry, why)) << why;
  // As many descriptors more as there are, what fails is the folder, then the entry, then nothing.
  const std::string answer = in_child([&] {
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    const int next = dup(0);
    close(next);
    std::string seen;
    for (int more = 0; more <= 2; ++more) {
      limit.rlim_cur = static_cast<rlim_t>(next + more);
      if (setrlimit(RLIMIT_NOFILE, &limit) != 0) return std::string("the limit cannot be set");
      seen += cache.load(entry.key, entry.version) ? "loaded " : "not loaded ";
    }
    return seen;
  });
  EXPECT_EQ(answer, "not loaded not loaded loaded ");
  if (geteuid() == 0) {
    const std::string other = in_child([&] {  // a user whose folder it is, and who may not read the entry
      const fs::path file = folder.entry();
      if (chown(folder.kernels().c_str(), 65534, 65534) != 0 || chown(file.c_str(), 65534, 65534) != 0 || chmod(file.c_str(), 0) != 0 ||
          chmod(folder.root().c_str(), 0755) != 0 || setgid(65534) != 0 || setuid(65534) != 0)
        return std::string("cannot change the user");
      const std::string first = cache.load(entry.key, entry.version) ? "loaded" : "not loaded";
      return first + ", " + cache.list().at(0).why;
    });
    EXPECT_EQ(other, "not loaded, it cannot be opened: Permission denied");
    EXPECT_FALSE(folder.entry().empty());
  }
}

TEST(JitSmallCache, LockIsHeldByOne) {
  const CacheFolder folder;
  const DiskCache cache(folder.kernels());
  const Digest key = sha256("a"), other = sha256("b");
  {
    const Descriptor held = cache.lock(key, 0);
    EXPECT_TRUE(held);
    EXPECT_FALSE(cache.lock(key, 0.01));
    EXPECT_TRUE(cache.lock(other, 0));
  }
  EXPECT_TRUE(cache.lock(key, 0));
}

}  // namespace
