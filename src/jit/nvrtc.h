// NVIDIA's run-time compiler (libnvrtc), opened at run time. Its C interface is declared here by ourselves, as far as it is used.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "jit/disk_cache.h"
#include "jit/key.h"

namespace fattn::core::jit {

using nvrtcProgram = struct NvrtcProgramHandle*;
using nvrtcResult = int;
inline constexpr nvrtcResult kNvrtcSuccess = 0;
inline constexpr nvrtcResult kNvrtcCompilation = 6;
inline constexpr nvrtcResult kNvrtcCancelled = 16;

struct Nvrtc {
  nvrtcResult (*createProgram)(nvrtcProgram* program, const char* source, const char* name, int nheaders, const char* const* headers,
                               const char* const* header_names) = nullptr;
  nvrtcResult (*destroyProgram)(nvrtcProgram* program) = nullptr;
  nvrtcResult (*compileProgram)(nvrtcProgram program, int noptions, const char* const* options) = nullptr;
  nvrtcResult (*getCUBINSize)(nvrtcProgram program, size_t* bytes) = nullptr;
  nvrtcResult (*getCUBIN)(nvrtcProgram program, char* image) = nullptr;
  nvrtcResult (*getProgramLogSize)(nvrtcProgram program, size_t* bytes) = nullptr;
  nvrtcResult (*getProgramLog)(nvrtcProgram program, char* log) = nullptr;
  const char* (*getErrorString)(nvrtcResult result) = nullptr;
  // Asked now and then while NVRTC works; 1 stops it. Null before CUDA 12.8.
  nvrtcResult (*setFlowCallback)(nvrtcProgram program, int (*callback)(void* payload, void* reserved), void* payload) = nullptr;

  NvrtcVersion version;
  std::vector<int> architectures;  // 75, 80, ...
  std::string path, reason;        // what was opened; why nothing was and what to do
  explicit operator bool() const { return createProgram != nullptr; }
};

// Opened at the first call (FATTN_NVRTC is read then), kept for the life of the process.
const Nvrtc& nvrtc();

// The version that nvrtc() has or would have. Opening the library costs more than loading a kernel from the cache (it has over
// 100 MB), so what was opened last is noted in the cache folder, and believed while the file and the settings that led to it are
// the same. Nothing if there is no NVRTC.
std::optional<NvrtcVersion> nvrtc_version(const DiskCache& cache);

}  // namespace fattn::core::jit
