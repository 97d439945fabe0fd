// What kernels and tables ask of a GPU: of one that is there, or of any of an architecture.
#pragma once

#include <cstdint>

#include "device/cuda_device.h"

namespace fattn::core::cuda {

// Of algorithms v1 and v2. `level` is what the kernel is written for, 75 or 80; `arch` what it is compiled for.
struct V2Target {
  int arch = 0;
  int level = 0;
  int64_t shared_bytes = 0;                     // that a CTA can have (opted in)
  int64_t shared_bytes_per_multiprocessor = 0;  // for all CTAs there
  int64_t l2_bytes = 0;
};

inline constexpr int kV3Arch = 90;  // compute capability 9.0 alone: sm_90a

// Of algorithm v3.
struct V3Target {
  int64_t shared_bytes = 0;  // that a CTA can have (opted in)
  int64_t l2_bytes = 0;
  int multiprocessors = 0;
};

struct DecodeTarget {
  V2Target device;
  int multiprocessors = 0;
  double bytes_per_second = 0;  // of its memory
};
DecodeTarget decode_target(const V2Target& device, const CudaDeviceInfo& info);

// Of any device of an architecture; `level` 0: the best for it.
V2Target target_of(int arch, int level = 0);
V3Target v3_target_of(int arch);

// All of them.
struct Target {
  V2Target v2;
  V3Target v3;
  DecodeTarget decode;
  bool has_v3 = false;           // algorithm v3 may be taken
  CudaDevice* device = nullptr;  // null: none is there
};
// `level` is the caller's cuda_level, 0: the best. Of an architecture throws Error(kUnsupported) if there are no kernels for it, or not of this
// level.
Target any_target(int arch, int level);
Target target_on(CudaDevice& device, int arch, int level);

}  // namespace fattn::core::cuda
