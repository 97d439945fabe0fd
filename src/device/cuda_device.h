// CUDA devices: what they are, their retained primary contexts, memory and launches, and how their errors become fattn::Error.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

#include "device/cuda_driver.h"
#include "fattn/error.hpp"

namespace fattn::core {

struct CudaDeviceInfo {
  int index = 0;
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  int64_t memory_bytes = 0, l2_bytes = 0;
  int shared_per_block = 0;        // without opting in: 48 KiB
  int shared_per_block_optin = 0;  // the most that a block can have, static and dynamic
  int shared_per_multiprocessor = 0;
  int registers_per_multiprocessor = 0;
  int threads_per_multiprocessor = 0;
  int clock_khz = 0, memory_clock_khz = 0;  // the highest that the driver states; 0: not stated
  int memory_bus_bits = 0;
  std::string pci_bus_id;  // "0000:65:00.0"
  std::string uuid;        // "GPU-...", empty if the driver does not say

  int capability() const { return 10 * major + minor; }  // 80, 90, 120
};

// The shape of a launch. With a cluster (capability 9.0 and later) the grid is a multiple of it. `early` (likewise): the kernel may come up while the
// one before it in the stream still runs, and waits for it itself (kernels/ptx/dependent_launch.h).
struct CudaLaunch {
  unsigned grid_x = 1, grid_y = 1, grid_z = 1;
  unsigned block_x = 1, block_y = 1, block_z = 1;
  unsigned shared_bytes = 0;  // dynamic; above 48 KiB funcSetAttribute(kMaxDynamicSharedBytes) comes first
  unsigned cluster_x = 1, cluster_y = 1, cluster_z = 1;
  bool early = false;
};

// Throws unless status is kCudaSuccess: `what` is what was being done, for people ("launching fattn_v2_fwd").
// The code is kOutOfMemory, kCompile (images that the driver refuses), kInvalidArgument (bad pointers, streams, use while a
// stream is captured), kUnsupported (no device, a driver that cannot be used) or kDevice (the rest).
// It does not record sticky errors: where there is a CudaDevice, use its check().
void throw_cuda_error(CUresult status, const char* what);
inline void cuda_check(CUresult status, const char* what) {
  if (status != kCudaSuccess) throw_cuda_error(status, what);
}
// "CUDA_ERROR_ILLEGAL_ADDRESS (700): an illegal memory access was encountered"
std::string cuda_error_text(CUresult status);
// After such an error the device does nothing more for this process.
bool is_sticky(CUresult status);

// Makes a context current on this thread while it lives; whatever was current before is current again afterwards.
class CudaCurrent {
 public:
  explicit CudaCurrent(CUcontext context);
  ~CudaCurrent();
  CudaCurrent(const CudaCurrent&) = delete;
  CudaCurrent& operator=(const CudaCurrent&) = delete;

 private:
  bool pushed_ = false;
};

// One device of this process. Every function may be called from several threads at once and leaves the current context of
// the calling thread as it was. All but info() throw after a sticky error and in the child of a fork.
class CudaDevice {
 public:
  CudaDevice(const CudaDriver& driver, CUdevice device, int index);  // use cuda_device()
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  const CudaDeviceInfo& info() const { return info_; }
  int index() const { return info_.index; }

  // The primary context, the one that the CUDA runtime (torch) uses too: retained at the first call, never released, because
  // modules and memory of the process live in it. Use it through current():
  //   const CudaCurrent scope = device.current();
  //   device.check(driver.launchKernel(...), "launching NAME");
  CUcontext context();
  [[nodiscard]] CudaCurrent current() { return CudaCurrent(context()); }

  // Throws as cuda_check does; a sticky error is kept, and every later call of this device throws it again.
  void check(CUresult status, const char* what) {
    if (status != kCudaSuccess) fail(status, what);
  }
  // Throws if this device has had a sticky error, or if this process is the child of one that used CUDA. Cheap.
  void require_usable();

  CUdeviceptr alloc(size_t bytes);  // kOutOfMemory says how much was asked for and is free; 0 bytes: 0
  void free(CUdeviceptr pointer);   // 0 does nothing
  void memory(size_t& free_bytes, size_t& total_bytes);
  // `name` is the kernel's, for messages; parameters[i] points at the kernel's i-th argument. Allocates nothing.
  void launch(CUfunction function, const CudaLaunch& shape, CUstream stream, void** parameters, const char* name);
  // Throws kInvalidArgument unless `pointer` is memory of this device (or managed memory); `name` is the tensor's.
  void require_on_device(const void* pointer, const char* name);

 private:
  [[noreturn]] void fail(CUresult status, const std::string& what);

  const CudaDriver& driver_;
  CUdevice device_;
  CudaDeviceInfo info_;
  std::atomic<CUcontext> context_{nullptr};
  std::atomic<bool> broken_{false};
  std::mutex mutex_;    // of sticky_, and of retaining the context
  std::string sticky_;  // the first sticky error's message
};

// How many devices there are. Initialises the driver at the first call. If 0, `reason` (may be null) says why and what to do.
int cuda_device_count(std::string* reason = nullptr);
// Throws kUnsupported with the reason if there is none, kInvalidArgument if only others are there. Lives as long as the process.
CudaDevice& cuda_device(int index);
// True in the child of a fork whose parent had initialised CUDA: the driver cannot be used there, whatever is called.
bool cuda_forked();

}  // namespace fattn::core
