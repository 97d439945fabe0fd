#include "jit/nvrtc.h"

#include <sys/stat.h>

#include <atomic>
#include <sstream>
#include <utility>

#include "device/dynamic_library.h"
#include "jit/nvrtc_search.h"
#include "shared/text.h"

namespace fattn::core::jit {
namespace {

constexpr const char* kNoteName = "nvrtc.txt";
constexpr int kOldestMajor = 12;

std::atomic<const Nvrtc*> opened{nullptr};

// Fills `to`, or returns why `library` cannot be used.
std::string bind(const DynamicLibrary& library, Nvrtc& to) {
  if (!library) return library.reason();
  std::string missing;
  const auto find = [&]<class Function>(Function& function, const char* symbol, bool needed = true) {
    function = library.function<Function>(symbol);
    if (!function && needed && missing.empty()) missing = symbol;
  };
  Nvrtc found;
  nvrtcResult (*get_version)(int*, int*) = nullptr;
  nvrtcResult (*count_architectures)(int*) = nullptr;
  nvrtcResult (*get_architectures)(int*) = nullptr;
  find(get_version, "nvrtcVersion");
  find(count_architectures, "nvrtcGetNumSupportedArchs");
  find(get_architectures, "nvrtcGetSupportedArchs");
  find(found.createProgram, "nvrtcCreateProgram");
  find(found.destroyProgram, "nvrtcDestroyProgram");
  find(found.compileProgram, "nvrtcCompileProgram");
  find(found.getCUBINSize, "nvrtcGetCUBINSize");
  find(found.getCUBIN, "nvrtcGetCUBIN");
  find(found.getProgramLogSize, "nvrtcGetProgramLogSize");
  find(found.getProgramLog, "nvrtcGetProgramLog");
  find(found.getErrorString, "nvrtcGetErrorString");
  find(found.setFlowCallback, "nvrtcSetFlowCallback", false);
  if (!missing.empty()) return "it has no function " + missing + ", so it is not NVRTC of CUDA 12 or later";
  int count = 0;
  if (get_version(&found.version.major, &found.version.minor) != kNvrtcSuccess || count_architectures(&count) != kNvrtcSuccess || count <= 0)
    return "it does not say which version it is and what it compiles for";
  if (found.version.major < kOldestMajor) return text("it is NVRTC ", found.version.major, ".", found.version.minor, "; 12.0 or later is needed");
  found.architectures.resize(static_cast<size_t>(count));
  if (get_architectures(found.architectures.data()) != kNvrtcSuccess) return "it does not say which architectures it compiles for";
  found.path = library.file_of("nvrtcVersion");
  to = std::move(found);
  return "";
}

// NVRTC opens a second library by its bare name when it compiles, and not every wheel (13.0) tells the loader that it lies beside the first. What is
// loaded already is found by its name.
void open_builtins(const Nvrtc& found) {
  const size_t folder = found.path.rfind('/') + 1;
  if (found.path.empty() || found.path[0] != '/') return;
  DynamicLibrary library(found.path.substr(0, folder) + text("libnvrtc-builtins.so.", found.version.major, ".", found.version.minor));
  std::move(library).keep();  // if it is not there NVRTC looks elsewhere, and says so if in vain
}

Nvrtc open_nvrtc() {
  Nvrtc found;
  std::string tried;
  for (const std::string& name : nvrtc_candidates()) {
    DynamicLibrary library(name);
    const std::string why = bind(library, found);
    if (why.empty()) {
      std::move(library).keep();
      open_builtins(found);
      return found;
    }
    tried += text(tried.empty() ? "" : "; ", name, ": ", why);
  }
  found.reason =
      "no usable NVRTC (the compiler of GPU kernels); install it (the CUDA toolkit, or, in an active virtual environment or with --user, "
      "pip install nvidia-cuda-nvrtc; for drivers before CUDA 13 nvidia-cuda-nvrtc-cu12) or set FATTN_NVRTC to the absolute path of "
      "libnvrtc.so.13 or .12. Tried " +
      tried;
  return found;
}

// What tells one file from another that was put in its place.
std::string identity(const std::string& path) {
  struct stat info {};
  if (path.empty() || path[0] != '/' || stat(path.c_str(), &info) != 0) return "";
  return text(info.st_dev, " ", info.st_ino, " ", info.st_size, " ", info.st_mtim.tv_sec, " ", info.st_mtim.tv_nsec);
}

// The note has four lines: settings, path, identity, version.
std::optional<NvrtcVersion> noted_version(const std::string& note) {
  std::istringstream lines(note);
  std::string noted_settings, path, noted_identity;
  NvrtcVersion version;
  if (!std::getline(lines, noted_settings) || !std::getline(lines, path) || !std::getline(lines, noted_identity)) return std::nullopt;
  if (!(lines >> version.major >> version.minor) || version.major < kOldestMajor) return std::nullopt;
  if (noted_identity.empty() || noted_settings != nvrtc_search_settings() || noted_identity != identity(path)) return std::nullopt;
  return version;
}

}  // namespace

const Nvrtc& nvrtc() {
  static const Nvrtc* const found = [] {
    const auto* made = new Nvrtc(open_nvrtc());  // never destroyed: other code may compile during static destruction
    opened.store(made, std::memory_order_release);
    return made;
  }();
  return *found;
}

std::optional<NvrtcVersion> nvrtc_version(const DiskCache& cache) {
  const auto of = [](const Nvrtc& n) { return n ? std::optional(n.version) : std::nullopt; };
  if (const Nvrtc* held = opened.load(std::memory_order_acquire)) return of(*held);
  if (const auto noted = noted_version(cache.read_text(kNoteName))) return noted;
  const Nvrtc& found = nvrtc();
  std::string why;
  if (found)
    cache.write_text(
        kNoteName,
        text(nvrtc_search_settings(), "\n", found.path, "\n", identity(found.path), "\n", found.version.major, " ", found.version.minor, "\n"), why);
  return of(found);
}

}  // namespace fattn::core::jit
