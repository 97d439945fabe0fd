// NVRTC found, missing and of the wrong kind; and NVRTC itself, where there is one.
#include <gtest/gtest.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <sstream>

#include "backend/cuda/lists.h"
#include "jit/jit.h"
#include "jit/nvrtc.h"
#include "jit_test.h"

namespace {

namespace fs = std::filesystem;
using namespace fattn::core::jit;
using fattn::test::CacheFolder;
using fattn::test::Done;
using fattn::test::expect_contains;
using fattn::test::request;
using fattn::test::run;
using fattn::test::write_file;

const bool stubs_are_set = fattn::test::use_stubs("/nonexistent/libcuda.so.1");

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

// Since 12.9 it keeps cubins, whose registers it does not tell again; before, it does not know the option that says not to.
TEST(JitNvrtc, ItsOwnCacheIsNotUsed) {
  for (const char* version : {"version=12.8", "version=12.9", "version=13.1"}) {
    const CacheFolder folder;
    const Done done = run({FATTN_JIT_BUILD_PATH, "fattn_test", "90a", request().source}, {{"STUB_NVRTC", version}});
    EXPECT_EQ(done.status, 0) << done.output;
    EXPECT_NE(done.output.find(" 42 "), std::string::npos) << version << ": " << done.output;
  }
}

// The wheel of 13.0 does not tell the loader that NVRTC's second library lies beside the first.
TEST(JitNvrtc, ItsSecondLibraryIsFoundBesideIt) {
  const CacheFolder folder;
  const fs::path copy = folder.root() / "libnvrtc.so.13", builtins = folder.root() / "libnvrtc-builtins.so.77.7";  // no machine has it
  fs::copy_file(FATTN_STUB_NVRTC_PATH, copy);
  const std::string needed = "version=77.7,builtins=" + builtins.filename().string();
  const auto built = [&] {
    return run({FATTN_JIT_BUILD_PATH, "fattn_test", "90a", request().source}, {{"FATTN_NVRTC", copy.c_str()}, {"STUB_NVRTC", needed.c_str()}});
  };
  expect_contains(built().output, "failed to open libnvrtc-builtins.so.77.7");
  fs::copy_file(FATTN_STUB_NVRTC_BUILTINS_PATH, builtins);
  const Done done = built();
  EXPECT_EQ(done.status, 0) << done.output;
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

// Folders of Pythons with an NVRTC each, and what a program finds in them.
class JitNvrtcSearch : public testing::Test {
 protected:
  // A file where a wheel has it, below this prefix.
  std::string wheel(const std::string& prefix, const std::string& python, const char* packages = "site-packages") const {
    const fs::path folder = folder_.root() / prefix / "lib" / python / packages / "nvidia/cu13/lib";
    fs::create_directories(folder);
    write_file(folder / "libnvrtc.so.13", "");
    return folder / "libnvrtc.so.13";
  }
  // The place of `path` among the candidates; 0 if it is not there.
  static size_t place_of(const std::string& path, const std::string& candidates) {
    const size_t at = ("\n" + candidates).find("\n" + path + "\n");
    return at == std::string::npos ? 0 : 1 + at;
  }
  using Changes = std::vector<std::pair<std::string, const char*>>;
  static std::string candidates(const std::vector<std::string>& command, const Changes& changes) {
    Changes all = {
        {"FATTN_NVRTC", nullptr}, {"VIRTUAL_ENV", nullptr}, {"CONDA_PREFIX", nullptr}, {"PYTHONUSERBASE", nullptr}, {"PYTHONNOUSERSITE", nullptr}};
    all.insert(all.end(), changes.begin(), changes.end());
    const Done done = run(command, all);
    EXPECT_EQ(done.status, 0) << done.output;
    return done.output;
  }
  const std::vector<std::string> program_{FATTN_JIT_BUILD_PATH, "--candidates"};
  CacheFolder folder_;
};

TEST_F(JitNvrtcSearch, PackagesOfTheUser) {
  const std::string home = folder_.root() / "home", base = folder_.root() / "base", environment = folder_.root() / "venv";
  const std::string older = wheel("home/.local", "python3.9"), newer = wheel("home/.local", "python3.13"), moved = wheel("base", "python3.11"),
                    active = wheel("venv", "python3.11");
  const std::string plain = candidates(program_, {{"HOME", home.c_str()}, {"VIRTUAL_ENV", environment.c_str()}});
  EXPECT_GT(place_of(older, plain), 0u) << plain;
  EXPECT_LT(place_of(newer, plain), place_of(older, plain)) << "versions are numbers: " << plain;
  EXPECT_LT(place_of(active, plain), place_of(newer, plain)) << "an environment is before the user's: " << plain;
  EXPECT_EQ(place_of(older, candidates(program_, {{"HOME", home.c_str()}, {"PYTHONNOUSERSITE", "1"}})), 0u);
  const std::string elsewhere = candidates(program_, {{"HOME", home.c_str()}, {"PYTHONUSERBASE", base.c_str()}});
  EXPECT_GT(place_of(moved, elsewhere), 0u) << elsewhere;
  EXPECT_EQ(place_of(newer, elsewhere), 0u) << elsewhere;
  const std::string command = "cd " + folder_.root().string() + " && exec " FATTN_JIT_BUILD_PATH " --candidates";
  EXPECT_EQ(candidates({"/bin/sh", "-c", command}, {{"HOME", "home"}}).find("home/"), std::string::npos) << "never the working directory";
  if (geteuid() == 0) {
    ASSERT_EQ(chown(fs::path(newer).parent_path().parent_path().parent_path().parent_path().c_str(), 65534, 65534), 0);
    const std::string foreign = candidates(program_, {{"HOME", home.c_str()}});
    EXPECT_EQ(place_of(newer, foreign), 0u) << "another user's: " << foreign;
    EXPECT_GT(place_of(older, foreign), 0u) << foreign;
  }
}

TEST_F(JitNvrtcSearch, PackagesOfTheRunningPython) {
  // The program as an interpreter, and an environment of it that no variable names.
  const fs::path interpreter = folder_.root() / "usr/bin/python3.11", bin = folder_.root() / "venv/bin";
  fs::create_directories(interpreter.parent_path());
  fs::create_directories(bin);
  fs::copy_file(FATTN_JIT_BUILD_PATH, interpreter);
  fs::create_symlink(interpreter, bin / "python");
  write_file(folder_.root() / "venv/pyvenv.cfg", "");
  const std::string own = wheel("usr", "python3.11"), debian = wheel("usr", "python3", "dist-packages"), environment = wheel("venv", "python3.11");
  const std::string base = candidates({interpreter, "--candidates"}, {});
  EXPECT_GT(place_of(own, base), 0u) << base;
  EXPECT_GT(place_of(debian, base), 0u) << base;
  EXPECT_EQ(place_of(environment, base), 0u) << base;
  const std::string by_path = candidates({bin / "python", "--candidates"}, {});
  EXPECT_GT(place_of(environment, by_path), 0u) << by_path;
  EXPECT_LT(place_of(environment, by_path), place_of(own, by_path)) << by_path;
  const std::string by_name = candidates({"/bin/sh", "-c", "exec python --candidates"}, {{"PATH", bin.c_str()}});
  EXPECT_GT(place_of(environment, by_name), 0u) << by_name;
  fs::remove(folder_.root() / "venv/pyvenv.cfg");
  const std::string no_environment = candidates({bin / "python", "--candidates"}, {});
  EXPECT_EQ(place_of(environment, no_environment), 0u) << no_environment;
  EXPECT_GT(place_of(own, no_environment), 0u) << no_environment;
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

// A kernel that only those ask for who want to be told of lists out of range.
TEST_F(JitReal, CompilesTheKernelOfTheStatus) {
  for (const int arch : architectures_) {
    const auto kernel = fattn::core::cuda::list_status_request({.arch = arch});
    const Done done = run({FATTN_JIT_BUILD_PATH, kernel.entry, std::to_string(arch), kernel.source}, changes());
    EXPECT_EQ(done.status, 0) << done.output;
  }
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
