// What the tests of run-time compilation share: stubs of the driver and of NVRTC, a cache folder of a test's own, requests and entries,
// and programs that a test starts.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "fattn/error.hpp"
#include "in_child.h"
#include "jit/entry.h"
#include "jit/jit.h"
#include "temporary_folder.h"
#include "thrown.h"

namespace fattn::test {

inline void expect_contains(const std::string& text, const std::string& part) { EXPECT_NE(text.find(part), std::string::npos) << "in: " << text; }

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
}
inline void write_file(const std::filesystem::path& path, const std::string& content) { std::ofstream(path, std::ios::binary) << content; }

// NVRTC is the stub and the driver this library, in a process that has opened neither yet: that happens once.
inline bool use_stubs(const char* driver) {
  setenv("FATTN_NVRTC", FATTN_STUB_NVRTC_PATH, 1);
  setenv("FATTN_CUDA_DRIVER", driver, 1);
  return true;
}

// FATTN_CACHE_DIR is a new folder and STUB_NVRTC counts compilations while it lives.
class CacheFolder {
 public:
  CacheFolder() {
    setenv("FATTN_CACHE_DIR", root().c_str(), 1);
    settings("");
  }
  ~CacheFolder() {
    unsetenv("FATTN_CACHE_DIR");
    unsetenv("STUB_NVRTC");
  }
  CacheFolder(const CacheFolder&) = delete;
  CacheFolder& operator=(const CacheFolder&) = delete;

  // Of the stub of NVRTC, besides counting.
  void settings(const std::string& more) const {
    const std::string all = "count=" + (root() / "count").string() + "," + more;
    setenv("STUB_NVRTC", all.c_str(), 1);
  }
  const std::filesystem::path& root() const { return folder_.path(); }
  std::filesystem::path kernels() const { return root() / "kernels"; }
  size_t compilations() const { return read_file(root() / "count").size() / 2; }
  std::vector<std::filesystem::path> files(const std::string& suffix) const {
    std::vector<std::filesystem::path> found;
    std::error_code none;
    for (const auto& item : std::filesystem::directory_iterator(kernels(), none))
      if (item.path().string().ends_with(suffix)) found.push_back(item.path());
    return found;
  }
  std::filesystem::path entry() const {
    const auto all = files(".cubin");
    return all.size() == 1 ? all[0] : std::filesystem::path();
  }

 private:
  TemporaryFolder folder_;
};

inline core::jit::Request request(const std::string& body = "", const std::string& entry = "fattn_test") {
  return {entry,
          "#include \"device_abi/mask.h\"\n// " + body + "\nextern \"C\" __global__ void " + entry + "(float* x) { x[threadIdx.x] *= 2.0f; }\n", 90,
          true};
}

inline core::jit::Entry some_entry(uint8_t number, size_t bytes = 1000) {
  core::jit::Entry entry;
  entry.key.fill(number);
  entry.version = {13, 0};
  entry.arch = 90;
  entry.arch_specific = true;
  entry.name = "fattn_entry";
  entry.description = "what it is for";
  entry.resources.registers = number;
  entry.resources.known = true;
  entry.seconds = 0.25;
  entry.log = "a log";
  entry.image = std::string(bytes, static_cast<char>(number));
  return entry;
}

struct Done {
  int status = -1;
  std::string output;
};

// A started program whose output can be waited for.
class Child {
 public:
  // `changes` are variables to set, or to take away where the value is null.
  Child(const std::vector<std::string>& command, const std::vector<std::pair<std::string, const char*>>& changes = {}) {
    int channel[2];
    if (pipe2(channel, O_CLOEXEC) != 0) std::abort();
    std::vector<char*> arguments;
    for (const std::string& part : command) arguments.push_back(const_cast<char*>(part.c_str()));
    arguments.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      for (const auto& [name, value] : changes) value ? setenv(name.c_str(), value, 1) : unsetenv(name.c_str());
      dup2(channel[1], STDOUT_FILENO);
      dup2(channel[1], STDERR_FILENO);
      execv(arguments[0], arguments.data());
      _exit(127);
    }
    close(channel[1]);
    from_ = channel[0];
  }
  Done wait() {
    Done done;
    char part[512];
    for (ssize_t n; (n = read(from_, part, sizeof part)) > 0;) done.output.append(part, static_cast<size_t>(n));
    close(from_);
    int status = 0;
    waitpid(pid_, &status, 0);
    done.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128;
    return done;
  }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
  int from_ = -1;
};

inline Done run(const std::vector<std::string>& command, const std::vector<std::pair<std::string, const char*>>& changes = {}) {
  return Child(command, changes).wait();
}

// What `body` returns or throws in a child of this process.
template <class Body>
std::string in_child(const Body& body) {
  return in_child({}, [&]() -> std::string {
    try {
      return body();
    } catch (const std::exception& error) {
      return error.what();
    }
  });
}

}  // namespace fattn::test
