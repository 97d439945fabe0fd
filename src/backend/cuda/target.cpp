#include "backend/cuda/target.h"

#include "backend/cuda/limits.h"
#include "fattn/error.hpp"
#include "plan/architectures.h"
#include "shared/text.h"

namespace fattn::core::cuda {
namespace {

constexpr int64_t kL2Bytes = 32 << 20;      // decides the order of the work, not the kernel
constexpr int64_t kV3L2Bytes = 50 << 20;    // of an H100, the smallest that algorithm v3 meets
constexpr int kMultiprocessors = 132;       // of an H100 or H200: decides the tile of small problems, and v3's ring backward (both are compiled)
constexpr double kBytesPerSecond = 4.8e12;  // of an H200: decides how decode splits the keys

}  // namespace

DecodeTarget decode_target(const V2Target& device, const CudaDeviceInfo& info) {
  constexpr double kUnknown = 15e9;  // bytes per second of a multiprocessor, where the driver does not state clock and width
  const double stated = 2e3 * info.memory_clock_khz * info.memory_bus_bits / 8;
  return {device, info.multiprocessors, stated > 0 ? stated : kUnknown * info.multiprocessors};
}

V2Target target_of(int arch, int level) {
  for (const Architecture& a : kArchitectures) {
    const int64_t bytes = int64_t{a.shared_kib} * 1024;
    // Of which a CTA can have all but what the system keeps, on 7.5 all.
    if (a.capability == arch)
      return {arch, level > 0 ? level : arch < 80 ? 75 : 80, arch < 80 ? bytes : bytes - kReservedSharedBytes, bytes, kL2Bytes};
  }
  throw Error(ErrorCode::kUnsupported, text("backend cuda: there are no kernels for architecture ", arch, "; allowed: ", known_architectures()));
}

V3Target v3_target_of(int arch) { return {target_of(arch).shared_bytes, kV3L2Bytes, kMultiprocessors}; }

Target any_target(int arch, int level) {
  const V2Target v2 = target_of(arch, level);
  if (v2.level > arch)
    throw Error(ErrorCode::kUnsupported, text("backend cuda: cuda_level is ", v2.level, ", which architecture ", arch, " cannot run; leave it at 0"));
  return {v2, v3_target_of(arch), {v2, kMultiprocessors, kBytesPerSecond}, arch == kV3Arch && level == 0, nullptr};
}

Target target_on(CudaDevice& device, int arch, int level) {
  const CudaDeviceInfo& gpu = device.info();
  const V2Target v2{arch, level > 0 ? level : target_of(arch).level, gpu.shared_per_block_optin, gpu.shared_per_multiprocessor, gpu.l2_bytes};
  return {v2,
          {gpu.shared_per_block_optin, gpu.l2_bytes, gpu.multiprocessors},
          decode_target(v2, gpu),
          gpu.capability() == kV3Arch && level == 0,
          &device};
}

}  // namespace fattn::core::cuda
