// What a compilation starts from: hashes, embedded sources, keys, the list of planned kernels, and what ptxas says of the result.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <sstream>
#include <string>
#include <tuple>

#include "fattn/error.hpp"
#include "jit/jit.h"
#include "jit/key.h"
#include "jit/planned.h"
#include "jit/sha256.h"
#include "jit/sources.h"
#include "jit_test.h"

namespace {

using namespace fattn::core::jit;
using fattn::Error;
using fattn::test::read_file;
using fattn::test::request;

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
  EXPECT_TRUE(std::any_of(all.begin(), all.end(), [](const Source& s) { return s.path == "device_abi/mask.h"; }));
  EXPECT_FALSE(std::any_of(all.begin(), all.end(), [](const Source& s) { return s.path == "shared/env.h"; })) << "it includes <string>";
}

TEST(JitSmallSources, EmbeddedBytesAreTheFiles) {
  for (const Source& source : embedded_sources()) {
    const std::string path(source.path);
    const std::string file = std::string(FATTN_SOURCE_ROOT) + (path.rfind("device_abi/", 0) == 0 ? "/src/" : "/") + path;
    EXPECT_TRUE(read_file(file) == source.text) << path << " is not what is embedded; build again";
  }
  std::string common;
  for (const Planned& planned : parse_planned(read_file(std::string(FATTN_SOURCE_ROOT) + "/kernels/planned.txt")))
    if (planned.embedded()) common += planned_line(planned) + "\n";
  std::string embedded;
  for (const Planned& planned : parse_planned(embedded_planned())) embedded += planned_line(planned) + "\n";
  EXPECT_TRUE(common == embedded) << "kernels/planned.txt is not what is embedded; build again";
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
  const Request base{"entry", "#include \"b.h\"\nint x;", 90, false};
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
  refused({"", "int x;", 90, false});
  refused({"has space", "int x;", 90, false});
  refused({"../escape", "int x;", 90, false});
  refused({std::string(kMaxEntryBytes + 1, 'x'), "int x;", 90, false});
  refused({"x", "", 90, false});
  refused({"x", std::string(kMaxSourceBytes + 1, ' '), 90, false});
  refused({"x", "int x;", 0, false});
  EXPECT_NO_THROW(key_of({"x", "int x;", 90, false}, embedded_sources()));
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

TEST(JitSmallPlanned, LinesRoundTrip) {
  const auto all = parse_planned(
      "# comment\n\ncommon 128 75,80,90a fattn_a #include \"device_abi/mask.h\"\\nint x; // \\\\\nfull 255 120 fattn_b int y;\npacked 9 80 c "
      "z\nquick 9 "
      "80 c z\n");
  ASSERT_EQ(all.size(), 4u);
  EXPECT_EQ(all[0].list, Planned::List::kCommon);
  EXPECT_EQ(all[0].budget, 128);
  ASSERT_EQ(all[0].targets.size(), 3u);
  EXPECT_EQ(all[0].targets[2].arch, 90);
  EXPECT_TRUE(all[0].targets[2].arch_specific);
  EXPECT_FALSE(all[0].targets[1].arch_specific);
  EXPECT_EQ(all[0].request.source, "#include \"device_abi/mask.h\"\nint x; // \\");
  EXPECT_EQ(all[1].list, Planned::List::kFull);
  EXPECT_EQ(all[2].list, Planned::List::kPacked);
  EXPECT_EQ(all[3].list, Planned::List::kQuick);
  for (const Planned& planned : all) {
    EXPECT_EQ(planned.embedded(), &planned == &all[0] || &planned == &all[2]);
    EXPECT_EQ(planned.quick(), &planned == &all[0] || &planned == &all[3]);
  }
  for (const Planned& planned : all) {
    const auto again = parse_planned(planned_line(planned));
    ASSERT_EQ(again.size(), 1u);
    EXPECT_EQ(planned_line(again[0]), planned_line(planned));
    EXPECT_EQ(again[0].request.source, planned.request.source);
  }
  for (const char* bad : {"quick 128 80 fattn_a", "slow 128 80 a int x;", "quick 0 80 a int x;", "quick 256 80 a int x;", "quick x 80 a int x;",
                          "quick 1 80b a int x;", "quick 1 , a int x;", "quick 1 80 a-b int x;", "quick"})
    EXPECT_THROW(parse_planned(bad), Error) << bad;
}

TEST(JitSmallPlanned, TheListIsWhole) {
  const auto all = parse_planned(read_file(std::string(FATTN_SOURCE_ROOT) + "/kernels/planned.txt"));
  ASSERT_FALSE(all.empty());
  // A kernel's key is made of these and of its headers, which are those of its #include lines: each set of these is looked up once.
  std::set<std::tuple<std::string, std::string, int, bool>> kernels;
  std::set<std::string> includes;
  size_t quick = 0;
  constexpr const char* kCheap[] = {"fattn_peak_", "fattn_merge", "fattn_rotary", "fattn_append"};
  for (const Planned& planned : all) {
    const Request& asked = planned.request;
    ASSERT_FALSE(planned.targets.empty()) << asked.entry;
    std::string headers;
    std::istringstream lines(asked.source);
    for (std::string line; std::getline(lines, line);)
      if (line.find("include") != std::string::npos) headers += line + '\n';
    if (includes.insert(headers).second) {
      EXPECT_NO_THROW(key_of(planned.on(planned.targets.front()), embedded_sources())) << asked.entry;
    }
    for (const Target& target : planned.targets) {
      EXPECT_NO_THROW(check_request(planned.on(target)));
      EXPECT_TRUE(kernels.emplace(asked.entry, asked.source, target.arch, target.arch_specific).second) << asked.entry << " is there twice";
      // Those that measure peaks compile in a twentieth of a second, of merge, rotary embeddings and append in half of one; the others take seconds.
      const bool cheap = std::any_of(std::begin(kCheap), std::end(kCheap), [&](const char* name) { return asked.entry.starts_with(name); });
      quick += planned.quick() && !cheap;
    }
  }
  EXPECT_LE(quick, 326u) << "of `make test`";
  // A part is left to `make test-all`, but no entry and no architecture.
  std::set<std::string> entries, quick_entries;
  std::set<std::pair<std::string, int>> common, quick_common;
  for (const Planned& planned : all) {
    (planned.quick() ? quick_entries : entries).insert(planned.request.entry);
    for (const Target& target : planned.targets) {
      if (planned.embedded()) common.emplace(planned.request.entry, target.arch);
      if (planned.quick()) quick_common.emplace(planned.request.entry, target.arch);
    }
  }
  for (const std::string& entry : entries)
    EXPECT_TRUE(quick_entries.count(entry) || entry == "fattn_list_status") << entry << " is not compiled by `make test`";  // JitReal has that one
  for (const auto& [entry, arch] : common) EXPECT_TRUE(quick_common.count({entry, arch})) << entry << " is not compiled by `make test` for " << arch;
  EXPECT_FALSE(planned_requests(90).empty());
  EXPECT_TRUE(planned_requests(33).empty());
}

}  // namespace
