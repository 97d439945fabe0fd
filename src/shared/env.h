// Every environment variable that the library reads, in one place (at most seven).
#pragma once

#include <string>
#include <vector>

namespace fattn::core {

struct EnvVar {
  const char* name;
  const char* meaning;
};

inline constexpr EnvVar kEnvCpuIsa{"FATTN_CPU_ISA",
                                   "instruction set of the CPU kernels where a call leaves the choice to the library: "
                                   "scalar, avx2, avx512, avx512_bf16, amx or neon"};
inline constexpr EnvVar kEnvNumThreads{"FATTN_NUM_THREADS", "threads of the CPU backend where a call asks for none in particular: 1 to 1024"};
inline constexpr EnvVar kEnvOpenBlas{"FATTN_OPENBLAS", "file name or path of the OpenBLAS library to open"};
inline constexpr EnvVar kEnvCudaDriver{"FATTN_CUDA_DRIVER", "file name or path of the CUDA driver library (libcuda) to open"};
inline constexpr EnvVar kEnvNvrtc{"FATTN_NVRTC", "file name or path of the NVRTC library (libnvrtc) to open"};
inline constexpr EnvVar kEnvNccl{"FATTN_NCCL", "file name or path of the NCCL library (libnccl) to open"};
inline constexpr EnvVar kEnvCacheDir{"FATTN_CACHE_DIR",
                                     "folder that keeps compiled GPU kernels and calibrations, an absolute path; ~/.cache/fattn if not set"};

inline constexpr EnvVar kEnvironment[] = {kEnvCpuIsa, kEnvNumThreads, kEnvOpenBlas, kEnvCudaDriver, kEnvNvrtc, kEnvNccl, kEnvCacheDir};

// The value, or an empty string if the variable is unset or empty.
std::string env_value(const EnvVar& variable);

}  // namespace fattn::core
