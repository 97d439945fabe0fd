// Run-time compilation: keys, the disk cache and everything that can be wrong with it, packs, NVRTC found, missing and failing.
// NVRTC is a stub (stub/nvrtc_stub.cpp), but for the last group.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <thread>

#include "fattn/error.hpp"
#include "jit/build_entry.h"
#include "jit/compile.h"
#include "jit/disk_cache.h"
#include "jit/jit.h"
#include "jit/key.h"
#include "jit/nvrtc.h"
#include "jit/pack.h"
#include "jit/planned.h"
#include "jit/sha256.h"
#include "jit/sources.h"
#include "jit_test.h"

namespace {

namespace fs = std::filesystem;
using namespace fattn::core::jit;
using fattn::Error;
using fattn::ErrorCode;
using fattn::test::CacheFolder;
using fattn::test::Child;
using fattn::test::Done;
using fattn::test::expect_contains;
using fattn::test::in_child;
using fattn::test::read_file;
using fattn::test::request;
using fattn::test::run;
using fattn::test::write_file;

// Set before anything opens NVRTC, which happens once in a process.
const bool stub_is_set = [] {
  setenv("FATTN_NVRTC", FATTN_STUB_NVRTC_PATH, 1);
  setenv("FATTN_CUDA_DRIVER", "/nonexistent/libcuda.so.1", 1);
  return true;
}();

std::string message_of(const Request& wanted) {
  try {
    build(wanted);
    return "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCompile);
    return error.what();
  }
}

Entry some_entry(uint8_t number, size_t bytes = 1000) {
  Entry entry;
  entry.key.fill(number);
  entry.version = {13, 0};
  entry.arch = 90;
  entry.arch_specific = true;
  entry.name = "fattn_entry";
  entry.resources.registers = number;
  entry.resources.known = true;
  entry.seconds = 0.25;
  entry.log = "a log";
  entry.image = std::string(bytes, static_cast<char>(number));
  return entry;
}

TEST(JitSmallSha256, KnownValues) {
  EXPECT_EQ(hex(sha256("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(sha256("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(sha256(std::string(1000000, 'a'))), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(JitSmallSha256, PiecesMakeNoDifference) {
  const std::string whole(1000, 'q');
  for (size_t piece : {1u, 7u, 63u, 64u, 65u, 999u}) {
    Sha256 hash;
    for (size_t at = 0; at < whole.size(); at += piece) hash.add(whole.data() + at, std::min(piece, whole.size() - at));
    EXPECT_EQ(hex(hash.finish()), hex(sha256(whole))) << piece;
  }
}

TEST(JitSmallSources, EmbeddedAreSortedAndIncludeOnlyEachOther) {
  const Sources all = embedded_sources();
  ASSERT_GT(all.size(), 3u);
  EXPECT_TRUE(std::is_sorted(all.begin(), all.end(), [](const Source& a, const Source& b) { return a.path < b.path; }));
  for (const Source& source : all) {
    EXPECT_EQ(source.text.data()[source.text.size()], '\0') << source.path;
    EXPECT_NO_THROW(reachable(source.text, all)) << source.path;
  }
  EXPECT_TRUE(std::any_of(all.begin(), all.end(), [](const Source& s) { return s.path == "shared/mask.h"; }));
  EXPECT_FALSE(std::any_of(all.begin(), all.end(), [](const Source& s) { return s.path == "shared/env.h"; })) << "it includes <string>";
}

TEST(JitSmallSources, EmbeddedBytesAreTheFiles) {
  for (const Source& source : embedded_sources()) {
    const std::string path(source.path);
    const std::string file = std::string(FATTN_SOURCE_ROOT) + (path.rfind("shared/", 0) == 0 ? "/src/" : "/") + path;
    EXPECT_TRUE(read_file(file) == source.text) << path << " is not what is embedded; build again";
  }
  std::string quick;
  for (const Planned& planned : parse_planned(read_file(std::string(FATTN_SOURCE_ROOT) + "/kernels/planned.txt")))
    if (planned.quick) quick += planned_line(planned) + "\n";
  std::string embedded;
  for (const Planned& planned : parse_planned(embedded_planned())) embedded += planned_line(planned) + "\n";
  EXPECT_TRUE(quick == embedded) << "kernels/planned.txt is not what is embedded; build again";
}

constexpr Source kTree[] = {
    {"a.h", "#include \"b.h\"\nint a;"}, {"b.h", "  #  include \"c.h\"\n"}, {"c.h", "#include \"a.h\"\nint c;"}, {"d.h", "int d;"}};

TEST(JitSmallSources, ReachableFollowsIncludes) {
  const auto found = reachable("#include \"b.h\"\n", kTree);
  ASSERT_EQ(found.size(), 3u);
  EXPECT_EQ(found[0].path, "a.h");
  EXPECT_EQ(found[1].path, "b.h");
  EXPECT_EQ(found[2].path, "c.h");
  EXPECT_TRUE(reachable("int x; // no includes", kTree).empty());
  EXPECT_THROW(reachable("#include \"gone.h\"", kTree), Error);
  EXPECT_THROW(reachable("#include <cuda_fp16.h>", kTree), Error);
  EXPECT_THROW(reachable("#include MACRO", kTree), Error);
  EXPECT_THROW(reachable("#include", kTree), Error);
}

TEST(JitSmallKey, EveryInputCounts) {
  const Request base{"entry", "#include \"b.h\"\nint x;", 90, false, 0};
  std::set<std::string> keys = {hex(key_of(base, kTree))};
  const auto differs = [&](const char* what, const Request& changed, Sources sources) {
    EXPECT_TRUE(keys.insert(hex(key_of(changed, sources))).second) << what;
  };
  Request r = base;
  r.entry = "entry2";
  differs("entry", r, kTree);
  r = base;
  r.source += " ";
  differs("source", r, kTree);
  r = base;
  r.arch = 100;
  differs("arch", r, kTree);
  r = base;
  r.arch_specific = true;
  differs("arch_specific", r, kTree);
  r = base;
  r.max_registers = 128;
  differs("max_registers", r, kTree);
  r = base;
  r.source = "#include \"d.h\"\nint x;";
  differs("another header", r, kTree);
  Source changed[4];
  for (int header = 0; header < 3; ++header) {
    std::copy(std::begin(kTree), std::end(kTree), changed);
    const std::string text = std::string(kTree[header].text) + " ";
    changed[header].text = text;
    differs("a byte of a header that is reached", base, changed);
  }
  std::copy(std::begin(kTree), std::end(kTree), changed);
  changed[3].text = "int changed;";
  EXPECT_EQ(hex(key_of(base, changed)), hex(key_of(base, kTree))) << "d.h is not reached";
  EXPECT_EQ(hex(key_of(base, kTree)), hex(key_of(base, kTree)));
}

TEST(JitSmallKey, NvrtcVersionIsInTheName) {
  const Digest key = sha256("x");
  EXPECT_NE(entry_file_name(key, {13, 0}), entry_file_name(key, {13, 1}));
  const auto name = parse_entry_file_name(entry_file_name(key, {12, 9}));
  ASSERT_TRUE(name);
  EXPECT_EQ(name->key_hex, hex(key));
  EXPECT_TRUE(name->version == (NvrtcVersion{12, 9}));
  for (const char* bad : {"", ".cubin", "x-1.2.cubin", "nvrtc.txt", ".new-1"}) EXPECT_FALSE(parse_entry_file_name(bad)) << bad;
  EXPECT_FALSE(parse_entry_file_name(hex(key) + "-13.cubin"));
  EXPECT_FALSE(parse_entry_file_name(hex(key) + "-13.0.cubin2"));
  EXPECT_FALSE(parse_entry_file_name(hex(key) + "-13.x.cubin"));
}

TEST(JitSmallKey, RequestsAreBounded) {
  const auto refused = [](Request r) { EXPECT_THROW(key_of(r, embedded_sources()), Error) << r.entry.substr(0, 20); };
  refused({"", "int x;", 90, false, 0});
  refused({"has space", "int x;", 90, false, 0});
  refused({"../escape", "int x;", 90, false, 0});
  refused({std::string(kMaxEntryBytes + 1, 'x'), "int x;", 90, false, 0});
  refused({"x", "", 90, false, 0});
  refused({"x", std::string(kMaxSourceBytes + 1, ' '), 90, false, 0});
  refused({"x", "int x;", 0, false, 0});
  refused({"x", "int x;", 90, false, 256});
  refused({"x", "int x;", 90, false, -1});
  EXPECT_NO_THROW(key_of({"x", "int x;", 90, false, 255}, embedded_sources()));
}

TEST(JitSmallResources, ReadFromTheLog) {
  const Resources r = parse_resources(
      "ptxas info    : 4 bytes gmem, 8 bytes cmem[4]\nptxas info    : Compiling entry function 'fattn_x' for 'sm_75'\n"
      "ptxas info    : Function properties for fattn_x\nptxas         .     256 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads\n"
      "ptxas info    : Used 78 registers, used 1 barriers, 272 bytes cumulative stack size, 512 bytes smem, 368 bytes cmem[0]\n");
  EXPECT_TRUE(r.known);
  EXPECT_EQ(r.registers, 78);
  EXPECT_EQ(r.stack_bytes, 272);
  EXPECT_EQ(r.spill_store_bytes, 12);
  EXPECT_EQ(r.spill_load_bytes, 20);
  EXPECT_EQ(r.shared_bytes, 512);
  EXPECT_EQ(r.barriers, 1);
  EXPECT_FALSE(r.degraded);
  EXPECT_FALSE(parse_resources("nothing of use\n").known);
  EXPECT_TRUE(parse_resources("ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
                              "insufficient register resources for the wgmma pipeline in the function 'x'\n")
                  .degraded);
  EXPECT_TRUE(parse_resources("ptxas warning : (C7507) Potential Performance Loss: 'setmaxnreg' ignored\n").degraded);
  EXPECT_FALSE(parse_resources("ptxas info    : (C7519) Potential Performance Loss: warpgroup.arrive is injected\n").degraded);
}

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

TEST(JitSmallBuild, FolderAndFilesArePrivate) {
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

TEST(JitSmallBuild, DamagedEntriesAreRebuilt) {
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

TEST(JitSmallBuild, LinksAndForeignFilesAreNotRead) {
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

TEST(JitSmallBuild, FoldersThatAreNotOursAreNotUsed) {
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

TEST(JitSmallBuild, CacheThatCannotBeWrittenIsNoError) {
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

TEST(JitSmallBuild, NoHomeIsNoError) {
  const CacheFolder folder;
  const std::string answer = in_child([] {
    unsetenv("FATTN_CACHE_DIR");
    unsetenv("XDG_CACHE_HOME");
    setenv("HOME", "/dev/null", 1);  // not even root can make a folder there
    return std::string(name_of(build(request()).origin)) + " " + name_of(build(request()).origin);
  });
  EXPECT_EQ(answer, "NVRTC NVRTC");
}

TEST(JitSmallBuild, FolderFollowsTheVariables) {
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
  const std::string message = message_of(bad);
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
  expect_contains(message_of(bad), "the log could not be kept");
  expect_contains(message_of(bad), "1 error detected");
}

TEST(JitSmallBuild, ArchitectureThatNvrtcLacks) {
  const CacheFolder folder;
  Request r = request();
  r.arch = 70;
  const std::string message = message_of(r);
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

TEST(JitNvrtc, VersionIsNotedAndCheckedAgainstTheFile) {
  const CacheFolder folder;
  // Of a copy, in processes of their own: the note is believed as long as the file is the same.
  const fs::path copy = folder.root() / "libnvrtc.so.13";
  fs::copy_file(FATTN_STUB_NVRTC_PATH, copy);
  const std::vector<std::string> command = {FATTN_JIT_BUILD_PATH, "fattn_test", "90a", request().source};
  const auto built = [&](const char* settings) {
    const std::string all = "count=" + (folder.root() / "count").string() + "," + settings;
    const Done done = run(command, {{"FATTN_NVRTC", copy.c_str()}, {"STUB_NVRTC", all.c_str()}});
    EXPECT_EQ(done.status, 0) << done.output;
    return done.output.substr(0, done.output.find(' '));
  };
  EXPECT_EQ(built("version=13.0"), "NVRTC");
  EXPECT_TRUE(fs::exists(folder.kernels() / "nvrtc.txt"));
  EXPECT_EQ(built("version=13.1"), "disk") << "the library is not opened for a hit";
  const timeval then[2] = {{1000, 0}, {1000, 0}};
  ASSERT_EQ(utimes(copy.c_str(), then), 0);
  EXPECT_EQ(built("version=13.1"), "NVRTC") << "another file, another version";
  EXPECT_EQ(folder.files(".cubin").size(), 2u);
  write_file(folder.kernels() / "nvrtc.txt", "nonsense");
  EXPECT_EQ(built("version=13.1"), "disk");
}

TEST(JitNvrtc, MissingSaysWhatToDo) {
  const CacheFolder folder;
  const auto answer = [&](const char* path) {
    const Done done = run({FATTN_JIT_BUILD_PATH, "fattn_test", "90a", request().source}, {{"FATTN_NVRTC", path}});
    return done.status == 1 ? done.output : "status " + std::to_string(done.status) + ": " + done.output;
  };
  const std::string missing = answer("/nonexistent/libnvrtc.so.13");
  expect_contains(missing, "kernel fattn_test for sm_90a is in no cache and no pack, and there is no usable NVRTC");
  expect_contains(missing, "pip install nvidia-cuda-nvrtc");
  expect_contains(missing, "FATTN_NVRTC");
  expect_contains(missing, "/nonexistent/libnvrtc.so.13");
  expect_contains(answer("./libnvrtc.so.13"), "a relative path is not opened");
  expect_contains(answer("libm.so.6"), "it has no function nvrtcVersion");
  expect_contains(answer(FATTN_STUB_NVRTC_INCOMPLETE_PATH), "it has no function nvrtcCreateProgram");
  folder.settings("version=11.8");
  expect_contains(answer(FATTN_STUB_NVRTC_PATH), "it is NVRTC 11.8; 12.0 or later is needed");
  // What another NVRTC compiled is good enough where there is none.
  folder.settings("");
  build(request());
  const Done done = run({FATTN_JIT_BUILD_PATH, "fattn_test", "90a", request().source}, {{"FATTN_NVRTC", "/nonexistent"}});
  EXPECT_EQ(done.output.rfind("disk cache ", 0), 0u) << done.output;
}

TEST(JitSmallPack, WrittenAndFound) {
  const CacheFolder folder;
  const std::string path = folder.root() / "x.pack";
  write_pack(path, {some_entry(3), some_entry(1), some_entry(2), some_entry(1)});
  const Pack pack(path);
  EXPECT_EQ(pack.size(), 3u);
  for (uint8_t i = 1; i <= 3; ++i) {
    const auto found = pack.find(some_entry(i).key);
    ASSERT_TRUE(found);
    EXPECT_EQ(found->image, some_entry(i).image);
  }
  EXPECT_FALSE(pack.find(some_entry(4).key));
  EXPECT_EQ(pack.all().size(), 3u);
  EXPECT_THROW(write_pack("/nonexistent/folder/x.pack", {}), Error);
}

TEST(JitSmallPack, DamageIsSeen) {
  const CacheFolder folder;
  const std::string path = folder.root() / "x.pack";
  write_pack(path, {some_entry(1), some_entry(2)});
  const std::string bytes = read_file(path);
  for (size_t size : {size_t{0}, size_t{10}, size_t{60}}) {
    write_file(path, bytes.substr(0, size));
    EXPECT_THROW(Pack{path}, Error) << size;
  }
  for (size_t at : {size_t{0}, size_t{8}, size_t{20}, size_t{60}, size_t{100}}) {
    std::string other = bytes;
    other[at] ^= 4;
    write_file(path, other);
    EXPECT_THROW(Pack{path}, Error) << at;
  }
  write_file(path, bytes.substr(0, bytes.size() - 1));
  EXPECT_THROW(Pack{path}, Error) << "the last entry is cut";
  std::string damaged = bytes;
  damaged.back() ^= 4;
  write_file(path, damaged);
  EXPECT_TRUE(Pack(path).find(some_entry(1).key));
  EXPECT_FALSE(Pack(path).find(some_entry(2).key)) << "the last entry is damaged";
  write_file(path, bytes);
  fs::permissions(path, fs::perms(0666));
  EXPECT_THROW(Pack{path}, Error) << "everybody can write it";
  if (geteuid() == 0) {
    fs::permissions(path, fs::perms(0644));
    ASSERT_EQ(chown(path.c_str(), 65534, 65534), 0);
    EXPECT_THROW(Pack{path}, Error) << "another user's";
  }
  EXPECT_THROW(Pack{folder.root()}, Error);
  EXPECT_THROW(Pack{"/nonexistent"}, Error);
}

TEST(JitSmallPack, BetweenDiskAndNvrtc) {
  const CacheFolder folder;
  const std::string answer = in_child([&] {
    const Request packed = request("packed");
    Entry entry = build_entry(packed).entry;
    entry.version = {12, 3};  // whatever NVRTC made it
    const std::string path = folder.root() / "x.pack";
    write_pack(path, {entry});
    default_disk_cache().clear();
    std::string seen;
    const auto note = [&](Origin first) { seen += std::string(name_of(build(packed, first).origin)) + ", "; };
    note(Origin::kPack);  // no pack yet: this goes into the disk cache
    add_pack(path);
    note(Origin::kDisk);
    default_disk_cache().clear();
    note(Origin::kDisk);
    note(Origin::kNvrtc);
    note(Origin::kDisk);
    try {
      add_pack("relative.pack");
    } catch (const Error& error) {
      seen += error.what();
    }
    return seen;
  });
  EXPECT_EQ(answer, "NVRTC, disk cache, pack, NVRTC, disk cache, the pack file relative.pack is named by a relative path; give an absolute one");
}

TEST(JitSmallPlanned, LinesRoundTrip) {
  const auto all =
      parse_planned("# comment\n\nquick 128 0 75,80,90a fattn_a #include \"shared/mask.h\"\\nint x; // \\\\\nfull 255 168 120 fattn_b int y;\n");
  ASSERT_EQ(all.size(), 2u);
  EXPECT_TRUE(all[0].quick);
  EXPECT_EQ(all[0].budget, 128);
  ASSERT_EQ(all[0].targets.size(), 3u);
  EXPECT_EQ(all[0].targets[2].arch, 90);
  EXPECT_TRUE(all[0].targets[2].arch_specific);
  EXPECT_FALSE(all[0].targets[1].arch_specific);
  EXPECT_EQ(all[0].request.source, "#include \"shared/mask.h\"\nint x; // \\");
  EXPECT_EQ(all[1].request.max_registers, 168);
  EXPECT_FALSE(all[1].quick);
  for (const Planned& planned : all) {
    const auto again = parse_planned(planned_line(planned));
    ASSERT_EQ(again.size(), 1u);
    EXPECT_EQ(planned_line(again[0]), planned_line(planned));
    EXPECT_EQ(again[0].request.source, planned.request.source);
  }
  for (const char* bad :
       {"quick 128 0 80 fattn_a", "slow 128 0 80 a int x;", "quick 0 0 80 a int x;", "quick 256 0 80 a int x;", "quick 1 x 80 a int x;",
        "quick 1 0 80b a int x;", "quick 1 0 , a int x;", "quick 1 300 80 a int x;", "quick 1 0 80 a-b int x;", "quick"})
    EXPECT_THROW(parse_planned(bad), Error) << bad;
}

TEST(JitSmallPlanned, TheListIsWhole) {
  const auto all = parse_planned(read_file(std::string(FATTN_SOURCE_ROOT) + "/kernels/planned.txt"));
  ASSERT_FALSE(all.empty());
  std::set<std::string> keys;
  size_t quick = 0;
  for (const Planned& planned : all) {
    for (const Target& target : planned.targets) {
      EXPECT_NO_THROW(EXPECT_TRUE(keys.insert(hex(key_of(planned.on(target), embedded_sources()))).second)
                      << planned.request.entry << " is there twice");
      quick += planned.quick;
    }
  }
  EXPECT_LE(quick, 400u) << "of `make test`";
  EXPECT_FALSE(planned_requests(90).empty());
  EXPECT_TRUE(planned_requests(33).empty());
}

// In the child of a fork the cache works; what the parent was compiling at the time cannot be waited for.
TEST(JitFork, WhileAThreadCompiles) {
  const CacheFolder folder;
  build(request());
  std::thread slow([] { build(request("STUB_SLOW fork")); });
  for (int i = 0; i < 200 && folder.compilations() < 2; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(in_child([] { return std::string(name_of(build(request()).origin)); }), "disk cache");
  expect_contains(in_child([] { return message_of(request("new in the child")); }), "it was forked while NVRTC compiled in its parent");
  slow.join();
  EXPECT_EQ(in_child([] { return std::string(name_of(build(request("new after")).origin)); }), "NVRTC");
}

// NVRTC itself, where there is one; FATTN_TEST_NVRTC names it, else it is looked for as a user's program looks for it.
class JitReal : public testing::Test {
 protected:
  void SetUp() override {
    real_ = std::getenv("FATTN_TEST_NVRTC");
    const Done done = run({FATTN_JIT_BUILD_PATH, "--architectures"}, changes());
    if (done.status != 0) GTEST_SKIP() << done.output;
    std::istringstream words(done.output);
    words >> path_;
    for (int arch; words >> arch;) architectures_.push_back(arch);
  }
  std::vector<std::pair<std::string, const char*>> changes() const { return {{"FATTN_NVRTC", real_}, {"STUB_NVRTC", nullptr}}; }

  CacheFolder folder_;
  const char* real_ = nullptr;
  std::string path_;
  std::vector<int> architectures_;
};

TEST_F(JitReal, CompilesForEveryArchitecture) {
  int compiled = 0;
  for (const int arch : {75, 80, 86, 89, 90, 100, 120}) {
    if (std::find(architectures_.begin(), architectures_.end(), arch) == architectures_.end()) continue;
    const std::string target = std::to_string(arch) + (arch == 90 ? "a" : "");
    const std::vector<std::string> command = {FATTN_JIT_BUILD_PATH, "fattn_test", target, request().source};
    const Done first = run(command, changes()), second = run(command, changes());
    EXPECT_EQ(first.status, 0) << first.output;
    EXPECT_EQ(first.output.rfind("NVRTC ", 0), 0u) << first.output;
    EXPECT_EQ(second.output.rfind("disk cache ", 0), 0u) << second.output;
    std::printf("sm_%s: first %ssm_%s: again %s", target.c_str(), first.output.c_str(), target.c_str(), second.output.c_str());
    ++compiled;
  }
  EXPECT_GE(compiled, 4);
}

TEST_F(JitReal, CompileErrorNamesTheLine) {
  const Done done = run({FATTN_JIT_BUILD_PATH, "fattn_test", "90a", "int x = unknown_name;\n"}, changes());
  EXPECT_EQ(done.status, 1);
  expect_contains(done.output, "identifier \"unknown_name\" is undefined");
  EXPECT_EQ(folder_.files(".log").size(), 1u);
}

TEST_F(JitReal, HeadersOfTheWorkingDirectoryAreNotFound) {
  // This one is in the working directory, and NVRTC alone would look there; the include is hidden from our own look.
  write_file(folder_.root() / "evil.h", "extern \"C\" __global__ void fattn_test(float* x) { x[0] = 1.0f; }\n");
  const std::string command =
      "cd " + folder_.root().string() + " && exec " FATTN_JIT_BUILD_PATH " fattn_test 90a \"$(printf '/**/ #include \"evil.h\"\\n')\"";
  const Done done = run({"/bin/sh", "-c", command}, changes());
  EXPECT_EQ(done.status, 1) << done.output;
  expect_contains(done.output, "evil.h");
}

}  // namespace
