// Pack files: written, found, damaged, and their place between disk cache and NVRTC, which is a stub.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fattn/error.hpp"
#include "jit/build_entry.h"
#include "jit/disk_cache.h"
#include "jit/jit.h"
#include "jit/pack.h"
#include "jit_test.h"

namespace {

namespace fs = std::filesystem;
using namespace fattn::core::jit;
using fattn::Error;
using fattn::test::CacheFolder;
using fattn::test::in_child;
using fattn::test::read_file;
using fattn::test::request;
using fattn::test::some_entry;
using fattn::test::write_file;

const bool stubs_are_set = fattn::test::use_stubs("/nonexistent/libcuda.so.1");

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

}  // namespace
