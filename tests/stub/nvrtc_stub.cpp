// A libnvrtc for tests, never installed: "compiles" to bytes that depend on everything it is given, and that the stub of libcuda
// takes. What the source says: #error is a compile error, STUB_SLOW takes a second, STUB_REFUSED gives an image that
// the driver refuses. The variable STUB_NVRTC holds settings: "version=12.8", "count=FILE" (a line is added to FILE for every
// compilation), "hang=1" (a compilation lasts until it is stopped), "builtins=NAME" (a compilation needs the library NAME, as the loader finds it).
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "cuda_stub.h"

#define STUB_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kInvalidInput = 3, kInvalidOption = 5, kCompilation = 6, kCancelled = 16;
constexpr int kArchitectures[] = {75, 80, 86, 87, 89, 90, 100, 120};

struct Program {
  std::string source, name, log, image;
  std::vector<std::string> headers;
  int (*callback)(void*, void*) = nullptr;
  void* payload = nullptr;
};

std::string setting(const std::string& name) {
  const char* all = std::getenv("STUB_NVRTC");
  const std::string text = all ? "," + std::string(all) + "," : "";
  const size_t at = text.find("," + name + "=");
  if (at == std::string::npos) return "";
  const size_t begin = at + name.size() + 2;
  return text.substr(begin, text.find(',', begin) - begin);
}

void count_compilation() {
  const std::string file = setting("count");
  const int fd = file.empty() ? -1 : open(file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (fd < 0) return;
  if (write(fd, "x\n", 2) != 2) std::abort();
  close(fd);
}

bool get_version(int& major, int& minor) {
  major = 13, minor = 0;
  const std::string wanted = setting("version");
  return wanted.empty() || std::sscanf(wanted.c_str(), "%d.%d", &major, &minor) == 2;
}

// Has a cache of its own, and says nothing of what it finds there.
bool has_cache() {
  int major, minor;
  return get_version(major, minor) && (major > 12 || (major == 12 && minor >= 9));
}

// False if the caller wants it stopped.
bool wait(const Program& program, double seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (std::chrono::steady_clock::now() < end) {
    if (program.callback && program.callback(program.payload, nullptr) == 1) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

}  // namespace

STUB_EXPORT int nvrtcVersion(int* major, int* minor) { return get_version(*major, *minor) ? 0 : kInvalidInput; }
STUB_EXPORT int nvrtcGetNumSupportedArchs(int* count) {
  *count = static_cast<int>(std::size(kArchitectures));
  return 0;
}
STUB_EXPORT int nvrtcGetSupportedArchs(int* architectures) {
  std::memcpy(architectures, kArchitectures, sizeof kArchitectures);
  return 0;
}
STUB_EXPORT const char* nvrtcGetErrorString(int status) { return status == kCompilation ? "STUB_ERROR_COMPILATION" : "STUB_ERROR"; }
#ifndef STUB_INCOMPLETE
STUB_EXPORT int nvrtcCreateProgram(Program** program, const char* source, const char* name, int count, const char* const* headers,
                                   const char* const* names) {
  auto* made = new Program{source, name, "", "", {}};
  for (int i = 0; i < count; ++i) made->headers.push_back(std::string(names[i]) + "\n" + headers[i]);
  *program = made;
  return 0;
}
#endif
STUB_EXPORT int nvrtcDestroyProgram(Program** program) {
  delete *program;
  *program = nullptr;
  return 0;
}
STUB_EXPORT int nvrtcSetFlowCallback(Program* program, int (*callback)(void*, void*), void* payload) {
  program->callback = callback;
  program->payload = payload;
  return 0;
}
STUB_EXPORT int nvrtcCompileProgram(Program* program, int count, const char* const* options) {
  count_compilation();
  std::string all = program->source + program->name, target;
  for (const std::string& header : program->headers) all += header;
  bool from_cache = has_cache();
  for (int i = 0; i < count; ++i) {
    if (std::strcmp(options[i], "--no-cache") == 0) {
      if (!has_cache()) return kInvalidOption;
      from_cache = false;
      continue;
    }
    all += options[i];
    if (std::strncmp(options[i], "--gpu-architecture=", 19) == 0) target = options[i] + 19;
  }
  if (target.empty()) return kInvalidOption;
  if (const std::string name = setting("builtins"); !name.empty() && dlopen(name.c_str(), RTLD_NOW) == nullptr) {
    program->log = "nvrtc: error: failed to open " + name + ".\n";
    return kCompilation;
  }
  if (!wait(*program, setting("hang") == "1" ? 600 : all.find("STUB_SLOW") != std::string::npos ? 1 : 0)) return kCancelled;
  if (all.find("#error") != std::string::npos) {
    program->log = program->name + "(1): error: #error directive\n1 error detected in the compilation.\n";
    return kCompilation;
  }
  if (!from_cache)
    program->log = "ptxas info    : Compiling entry function 'x' for '" + target +
                   "'\nptxas         .     16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n"
                   "ptxas info    : Used 42 registers, used 1 barriers, 16 bytes cumulative stack size, 512 bytes smem\n";
  uint64_t hash = 14695981039346656037u;
  for (const char c : all) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  program->image = all.find("STUB_REFUSED") != std::string::npos ? "no cubin " : fattn::test::kStubCubinMagic;
  program->image += target + " " + std::to_string(hash) + std::string(1000, 'x');
  return 0;
}
STUB_EXPORT int nvrtcGetCUBINSize(Program* program, size_t* bytes) {
  *bytes = program->image.size();
  return 0;
}
STUB_EXPORT int nvrtcGetCUBIN(Program* program, char* image) {
  std::memcpy(image, program->image.data(), program->image.size());
  return 0;
}
STUB_EXPORT int nvrtcGetProgramLogSize(Program* program, size_t* bytes) {
  *bytes = program->log.size() + 1;
  return 0;
}
STUB_EXPORT int nvrtcGetProgramLog(Program* program, char* log) {
  std::memcpy(log, program->log.c_str(), program->log.size() + 1);
  return 0;
}
