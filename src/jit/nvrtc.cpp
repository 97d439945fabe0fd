#include "jit/nvrtc.h"

#include <glob.h>
#include <link.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <sstream>
#include <utility>

#include "device/cuda_driver.h"
#include "device/dynamic_library.h"
#include "shared/env.h"
#include "shared/text.h"

namespace fattn::core::jit {
namespace {

constexpr const char* kNoteName = "nvrtc.txt";
constexpr int kOldestMajor = 12;

std::atomic<const Nvrtc*> opened{nullptr};

// What a variable of other programs says, if it is an absolute path: a relative one would mean the working directory.
std::string folder_in(const char* variable) {
  const char* value = std::getenv(variable);
  return value && value[0] == '/' ? value : "";
}

void add_matches(std::vector<std::string>& to, const std::string& pattern) {
  glob_t found{};
  if (glob(pattern.c_str(), 0, nullptr, &found) == 0)
    for (size_t i = found.gl_pathc; i-- > 0;) to.emplace_back(found.gl_pathv[i]);  // the highest version first
  globfree(&found);
}

// The package folders of the running Python: those that anything loaded into this process came from (this library, torch), and
// those of the interpreter and of an active environment.
std::vector<std::string> package_folders() {
  std::vector<std::string> folders;
  const auto visit = [](dl_phdr_info* object, size_t, void* to) {
    const std::string_view name = object->dlpi_name ? object->dlpi_name : "";
    for (const std::string_view mark : {"/site-packages/", "/dist-packages/"}) {
      const size_t at = name.find(mark);
      if (name.empty() || name[0] != '/' || at == std::string_view::npos) continue;
      auto& all = *static_cast<std::vector<std::string>*>(to);
      const std::string folder(name.substr(0, at + mark.size() - 1));
      if (std::find(all.begin(), all.end(), folder) == all.end()) all.push_back(folder);
    }
    return 0;
  };
  dl_iterate_phdr(visit, &folders);
  char program[4096];
  const ssize_t n = readlink("/proc/self/exe", program, sizeof program);
  const std::string executable(program, n > 0 ? static_cast<size_t>(n) : 0);
  if (const size_t bin = executable.rfind("/bin/python"); bin != std::string::npos)
    add_matches(folders, executable.substr(0, bin) + "/lib/python3*/site-packages");
  for (const char* variable : {"VIRTUAL_ENV", "CONDA_PREFIX"})
    if (const std::string folder = folder_in(variable); !folder.empty()) add_matches(folders, text(folder, "/lib/python3*/site-packages"));
  return folders;
}

// Majors to look for, best first: cubins of a newer major than the driver's are refused by it.
std::vector<int> majors() { return cuda_driver() && cuda_driver().version < 13000 ? std::vector<int>{12, 13} : std::vector<int>{13, 12}; }

std::vector<std::string> candidates() {
  const std::string wanted = env_value(kEnvNvrtc);
  if (!wanted.empty()) return {wanted};
  std::vector<std::string> folders;
  for (const char* variable : {"CUDA_HOME", "CUDA_PATH"})
    if (const std::string folder = folder_in(variable); !folder.empty()) folders.push_back(folder + "/lib64");
  for (const std::string& packages : package_folders())
    for (const char* wheel : {"/nvidia/cu13/lib", "/nvidia/cuda_nvrtc/lib"}) folders.push_back(packages + wheel);
  folders.emplace_back("/usr/local/cuda/lib64");
  add_matches(folders, "/usr/local/cuda-1[2-9]*/lib64");
  folders.emplace_back("/opt/cuda/lib64");
  if (const std::string folder = folder_in("CONDA_PREFIX"); !folder.empty()) folders.push_back(folder + "/lib");
  std::vector<std::string> names;
  for (const int major : majors()) {
    const std::string name = text("libnvrtc.so.", major);
    names.push_back(name);  // the loader's own folders
    for (const std::string& folder : folders) {
      const std::string path = text(folder, "/", name);
      if (access(path.c_str(), R_OK) == 0 && std::find(names.begin(), names.end(), path) == names.end()) names.push_back(path);
    }
  }
  return names;
}

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

Nvrtc open_nvrtc() {
  Nvrtc found;
  std::string tried;
  for (const std::string& name : candidates()) {
    DynamicLibrary library(name);
    const std::string why = bind(library, found);
    if (why.empty()) {
      std::move(library).keep();
      return found;
    }
    tried += text(tried.empty() ? "" : "; ", name, ": ", why);
  }
  found.reason =
      "no usable NVRTC (the compiler of GPU kernels); install it (the CUDA toolkit, or, in an "
      "active virtual environment, pip install nvidia-cuda-nvrtc; for drivers before CUDA 13 nvidia-cuda-nvrtc-cu12) or set FATTN_NVRTC to the "
      "absolute path of libnvrtc.so.13 or .12. Tried " +
      tried;
  return found;
}

// Everything but the file system that decides which library is found.
std::string settings() {
  std::ostringstream all;
  for (const char* variable : {"FATTN_NVRTC", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "VIRTUAL_ENV", "CONDA_PREFIX"}) {
    const char* value = std::getenv(variable);
    all << variable << (value ? "=" : "") << (value ? value : "") << '\n';
  }
  for (const std::string& folder : package_folders()) all << folder << '\n';
  all << majors()[0];
  return hex(sha256(all.str()));
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
  if (noted_identity.empty() || noted_settings != settings() || noted_identity != identity(path)) return std::nullopt;
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
    cache.write_text(kNoteName,
                     text(settings(), "\n", found.path, "\n", identity(found.path), "\n", found.version.major, " ", found.version.minor, "\n"), why);
  return of(found);
}

}  // namespace fattn::core::jit
