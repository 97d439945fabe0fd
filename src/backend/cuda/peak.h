// What a CUDA device can do at most, measured: what a rate is a share of.
#pragma once

#include <vector>

#include "device/cuda_device.h"
#include "jit/jit.h"

namespace fattn::core {

enum class CudaPeak {
  kMatrix = FATTN_PEAK_MATRIX,        // FLOP/s of the tensor cores, 16-bit inputs, fp32 sums, by the fastest instructions that the kernels know
  kFma = FATTN_PEAK_FMA,              // FLOP/s in fp32
  kRead = FATTN_PEAK_READ,            // bytes a second read from memory
  kExp = FATTN_PEAK_EXP,              // 2^x a second, fp32
  kShared = FATTN_PEAK_SHARED,        // bytes a second read from shared memory, by all multiprocessors
  kL2 = FATTN_PEAK_L2,                // bytes a second read from the L2 cache
  kCopy = FATTN_PEAK_COPY,            // bytes a second read from and written to memory, both counted
  kLaunch = FATTN_PEAK_LAUNCH,        // kernels a second that do nothing, one behind the other on a stream
  kRoundTrip = FATTN_PEAK_ROUND_TRIP  // the same where the host waits for each
};
constexpr CudaPeak kCudaPeaks[] = {CudaPeak::kMatrix, CudaPeak::kFma,  CudaPeak::kRead,   CudaPeak::kExp,      CudaPeak::kShared,
                                   CudaPeak::kL2,     CudaPeak::kCopy, CudaPeak::kLaunch, CudaPeak::kRoundTrip};

// About 30 ms on the default stream, plus the compilation at the first call. Waits for the device.
double measure_cuda_peak(CudaDevice& device, CudaPeak peak);

// The kernels that it needs on an architecture.
std::vector<jit::Request> cuda_peak_requests(int arch);

}  // namespace fattn::core
