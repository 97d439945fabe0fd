// A plan: which backend computes a problem, on the CPU also which kernel and how the work is split, or why nothing can. The only place where that is
// decided; backends obey, and say how much workspace it takes. On a GPU algorithm, kernels and grids follow from the CUDA backend's tables, of which
// its planners (src/backend/cuda/plan) make routes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "device/cpu_info.h"
#include "device/cuda_device.h"
#include "device_abi/dropout.h"
#include "problem/problem.h"

namespace fattn::core {

// How the CPU backend splits a problem, for algorithm v1 in blocks of `rows` and `block_k`. Everything but `threads` depends on the problem and the
// instruction set alone, so the results do not depend on the number of threads.
struct CpuPlan {
  enum class Path { kForward, kDecode, kBackward };
  Path path = Path::kForward;
  Isa isa = Isa::kScalar;
  int threads = 1;
  int64_t rows = 0;     // query rows of a task: a block forward, all rows of a key head in decode
  int64_t block_k = 0;  // keys of one inner step
  int64_t task_k = 0;   // keys of a task: decode chunk, backward super-block
  int64_t heads = 1;    // decode: key heads that a task takes together
  int64_t splits = 1;   // backward: tasks of a (batch, key head), one for all of its super-blocks or one for each; decode: chunks of keys
};

// Where decode's chunks of keys begin: no query sees those before; with dropout at a block of its random numbers.
inline int64_t first_key_of_decode(const Mask& mask, const Problem& p) {
  const int64_t first = mask.visible_begin(0);
  return p.dropout_below > 0 ? first / kDropoutBlock * kDropoutBlock : first;
}

// What the CUDA backend is told: what its kernels are written and compiled for. Its routes are here.
struct CudaPlan {
  int level = 0;  // compute capability that the kernels are written for: 75, 80
  int arch = 0;   // compute capability that they are compiled for
  std::shared_ptr<const struct CudaRoutes> routes;
};

struct Plan {
  Problem problem;
  Backend backend = Backend::kReference;
  Algorithm algorithm = Algorithm::kStandard;  // on a GPU what was asked for, until its backend has chosen
  CpuPlan cpu;                                 // for Backend::kCpu
  CudaPlan cuda;                               // for Backend::kCuda
  size_t workspace_bytes = 0;
  Cost cost;
  std::string kernel, why;
};

// Who computes tensors that lie there. Throws Error(kUnsupported) where the backend that was asked for does not.
Backend choose_backend(Backend asked, DType dtype, Device device, int device_index);

// Throws Error(kUnsupported) with the reason if nothing here can run the problem. Leaves workspace_bytes to the backend. `gpu` is
// asked for a device's description if the problem is on one; it throws where there is none.
Plan make_plan(const Problem& problem, const CpuInfo& cpu, const CudaDeviceInfo& (*gpu)(int index));

}  // namespace fattn::core
