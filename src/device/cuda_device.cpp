// Initialises the driver once, describes the devices, and keeps what each must remember: its context and its sticky error.
#include "device/cuda_device.h"

#include <pthread.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "shared/text.h"

namespace fattn::core {
namespace {

// Whether this process may use the driver. Global, because the driver's state is; never destroyed, because forks come at any time.
struct ForkState {
  std::atomic<bool> initialized{false};  // cuInit has been called by this process
  std::atomic<bool> forked{false};       // by the one that this process was forked from
};
ForkState& fork_state() {
  static ForkState& state = *new ForkState;
  return state;
}
void after_fork_in_child() {
  ForkState& state = fork_state();
  if (state.initialized) state.forked = true;
}

constexpr const char* kForked =
    "this process was forked from one that had used CUDA, and a CUDA driver does not work across fork; start workers by spawn (Python: "
    "multiprocessing.set_start_method('spawn')), or fork before the first use of a GPU";

struct Devices {
  std::vector<std::unique_ptr<CudaDevice>> all;
  std::string reason;  // why there are none
};

const char* hint_for_init(CUresult status) {
  switch (status) {
    case kCudaNotInitialized: return "; if this process was forked from one that had used CUDA, start it by spawn instead";
    case kCudaNoDevice:
      return std::getenv("CUDA_VISIBLE_DEVICES") ? "; CUDA_VISIBLE_DEVICES is set and may hide devices"
                                                 : "; is there an NVIDIA GPU, and is it given to this container?";
    case kCudaStubLibrary: return "; it is the toolkit's stub for linking, not a driver: set FATTN_CUDA_DRIVER to the real libcuda.so.1";
    case kCudaSystemDriverMismatch:
      return "; the library and the kernel's module are of different versions: restart the machine after a driver update";
    case kCudaCompatNotSupported: return "; a compatibility package is used on a GPU that it does not support: remove it from the loader's path";
    default: return "; does nvidia-smi work?";
  }
}

Devices find_devices() {
  // Before anything else: a child that is forked by another thread meanwhile must not wait for this thread, which it does not have.
  pthread_atfork(nullptr, nullptr, after_fork_in_child);
  fork_state().initialized = true;
  Devices found;
  const CudaDriver& driver = cuda_driver();
  if (!driver) {
    fork_state().initialized = false;  // a child may try, and hears the same
    found.reason = driver.reason;
    return found;
  }
  int count = 0;
  const char* what = "cuInit";
  CUresult status = driver.init(0);
  if (status == kCudaSuccess) {
    what = "cuDeviceGetCount";
    status = driver.deviceGetCount(&count);
  }
  if (status == kCudaSuccess && count == 0) status = kCudaNoDevice;
  if (status != kCudaSuccess) {
    fork_state().initialized = false;
    found.reason = text("no usable CUDA device: ", what, " of ", driver.path, " (CUDA ", cuda_version_text(driver.version), ") says ",
                        cuda_error_text(status), hint_for_init(status));
    return found;
  }
  for (int i = 0; i < count; ++i) {
    CUdevice device = 0;
    if (const CUresult gone = driver.deviceGet(&device, i); gone != kCudaSuccess) {
      found.all.clear();
      found.reason = text("CUDA device ", i, " of ", count, " cannot be used: ", cuda_error_text(gone), hint_for_init(gone));
      return found;
    }
    found.all.push_back(std::make_unique<CudaDevice>(driver, device, i));
  }
  return found;
}

const Devices& devices() {
  static const Devices& found = *new Devices(find_devices());  // never destroyed: kernels may run until the process ends
  return found;
}

CudaDeviceInfo describe(const CudaDriver& driver, CUdevice device, int index) {
  // What a driver does not say stays 0 or empty; a device that is this broken fails at its first use with a reason.
  const auto number = [&](CUdevice_attribute attribute) {
    int value = 0;
    return driver.deviceGetAttribute(&value, attribute, device) == kCudaSuccess ? value : 0;
  };
  CudaDeviceInfo info;
  info.index = index;
  char name[128] = "";
  info.name = driver.deviceGetName(name, sizeof name - 1, device) == kCudaSuccess && name[0] ? name : "a device without a name";
  size_t bytes = 0;
  if (driver.deviceTotalMem(&bytes, device) == kCudaSuccess) info.memory_bytes = static_cast<int64_t>(bytes);
  info.major = number(CUdevice_attribute::kMajor);
  info.minor = number(CUdevice_attribute::kMinor);
  info.multiprocessors = number(CUdevice_attribute::kMultiprocessors);
  info.l2_bytes = number(CUdevice_attribute::kL2Bytes);
  info.shared_per_block = number(CUdevice_attribute::kSharedPerBlock);
  info.shared_per_block_optin = number(CUdevice_attribute::kSharedPerBlockOptin);
  info.shared_per_multiprocessor = number(CUdevice_attribute::kSharedPerMultiprocessor);
  info.registers_per_multiprocessor = number(CUdevice_attribute::kRegistersPerMultiprocessor);
  info.threads_per_multiprocessor = number(CUdevice_attribute::kMaxThreadsPerMultiprocessor);
  info.clock_khz = number(CUdevice_attribute::kClockKhz);
  info.memory_clock_khz = number(CUdevice_attribute::kMemoryClockKhz);
  info.memory_bus_bits = number(CUdevice_attribute::kMemoryBusBits);
  char pci[32];
  std::snprintf(pci, sizeof pci, "%04x:%02x:%02x.0", static_cast<unsigned>(number(CUdevice_attribute::kPciDomainId)),
                static_cast<unsigned>(number(CUdevice_attribute::kPciBusId)), static_cast<unsigned>(number(CUdevice_attribute::kPciDeviceId)));
  info.pci_bus_id = pci;
  CUuuid uuid{};
  if (driver.deviceGetUuid && driver.deviceGetUuid(&uuid, device) == kCudaSuccess) {
    info.uuid = "GPU-";
    for (int i = 0; i < 16; ++i) {
      char two[4];
      std::snprintf(two, sizeof two, "%02x", static_cast<unsigned>(uuid.bytes[i]));
      info.uuid += (i == 4 || i == 6 || i == 8 || i == 10) ? std::string("-") + two : std::string(two);
    }
  }
  return info;
}

bool is_refused_image(CUresult status) {
  return status == kCudaInvalidImage || status == kCudaNoBinaryForGpu || status == kCudaInvalidPtx || status == kCudaUnsupportedPtxVersion ||
         status == kCudaJitCompilerNotFound || status == kCudaNotFound;
}
bool is_of_capture(CUresult status) { return status >= kCudaStreamCaptureUnsupported && status <= kCudaStreamCaptureWrongThread; }

ErrorCode code_of(CUresult status) {
  if (is_refused_image(status)) return ErrorCode::kCompile;
  if (is_of_capture(status)) return ErrorCode::kInvalidArgument;
  switch (status) {
    case kCudaOutOfMemory: return ErrorCode::kOutOfMemory;
    case kCudaInvalidValue:
    case kCudaInvalidHandle:
    case kCudaInvalidDevice: return ErrorCode::kInvalidArgument;
    case kCudaNoDevice:
    case kCudaStubLibrary: return ErrorCode::kUnsupported;
    default: return ErrorCode::kDevice;
  }
}

const char* hint(CUresult status) {
  if (is_sticky(status)) return "; this GPU does nothing more for this process: restart the process";
  if (is_of_capture(status)) return "; this cannot be part of the capture of a CUDA graph: do it before or after";
  if (is_refused_image(status)) return "; the driver does not take this kernel: clear the kernel cache, or update the NVIDIA driver";
  switch (status) {
    case kCudaOutOfMemory: return "; free GPU memory or use a smaller problem";
    case kCudaInvalidHandle: return "; the stream, event or graph has been destroyed or belongs to another device";
    case kCudaInvalidValue: return "; a pointer or size does not belong to this device's memory";
    case kCudaNotInitialized:
    case kCudaDeinitialized: return "; the driver is shut down: this process is ending";
    case kCudaDeviceUnavailable: return "; another process has the device for itself";
    case kCudaInvalidContext: return "; was the device reset by other code of this process? Then restart the process";
    default: return "";
  }
}

std::string message_of(CUresult status, const std::string& what) { return text(what, " failed: ", cuda_error_text(status), hint(status)); }

}  // namespace

std::string cuda_error_text(CUresult status) {
  const CudaDriver& driver = cuda_driver();
  const char* name = nullptr;
  const char* meaning = nullptr;
  if (driver && driver.getErrorName(status, &name) != kCudaSuccess) name = nullptr;
  if (driver && driver.getErrorString(status, &meaning) != kCudaSuccess) meaning = nullptr;
  return text(name ? name : "CUDA error", " (", status, ")", meaning ? ": " : "", meaning ? meaning : "");
}

bool is_sticky(CUresult status) {
  switch (status) {
    case kCudaEccUncorrectable:
    case kCudaNvlinkUncorrectable:
    case kCudaContained:
    case kCudaIllegalAddress:
    case kCudaLaunchTimeout:
    case kCudaContextIsDestroyed:
    case kCudaAssert:
    case kCudaHardwareStackError:
    case kCudaIllegalInstruction:
    case kCudaMisalignedAddress:
    case kCudaInvalidAddressSpace:
    case kCudaInvalidPc:
    case kCudaLaunchFailed:
    case kCudaTensorMemoryLeak:
    case kCudaMpsClientTerminated:
    case kCudaExternalDevice: return true;
    default: return false;
  }
}

void throw_cuda_error(CUresult status, const char* what) { throw Error(code_of(status), message_of(status, what)); }

CudaCurrent::CudaCurrent(CUcontext context) {
  const CudaDriver& driver = cuda_driver();
  CUcontext now = nullptr;
  cuda_check(driver.ctxGetCurrent(&now), "asking for the current CUDA context");
  if (now == context) return;
  cuda_check(driver.ctxPushCurrent(context), "making the device's CUDA context current");
  pushed_ = true;
}

CudaCurrent::~CudaCurrent() {
  CUcontext ours = nullptr;
  if (pushed_) cuda_driver().ctxPopCurrent(&ours);  // a failure has nobody to tell, and leaves nothing to undo
}

CudaDevice::CudaDevice(const CudaDriver& driver, CUdevice device, int index)
    : driver_(driver), device_(device), info_(describe(driver, device, index)) {}

void CudaDevice::require_usable() {
  if (cuda_forked()) throw Error(ErrorCode::kDevice, kForked);
  if (!broken_.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(mutex_);
  throw Error(ErrorCode::kDevice, sticky_);
}

void CudaDevice::fail(CUresult status, const std::string& what) {
  const std::string on = text("cuda:", info_.index, " (", info_.name, "): ");
  if (!is_sticky(status)) throw Error(code_of(status), on + message_of(status, what));
  const std::lock_guard lock(mutex_);
  if (!broken_.load(std::memory_order_relaxed)) sticky_ = on + message_of(status, what);
  broken_.store(true, std::memory_order_release);
  throw Error(ErrorCode::kDevice, sticky_);
}

CUcontext CudaDevice::context() {
  require_usable();
  if (CUcontext known = context_.load(std::memory_order_acquire)) return known;
  CUcontext retained = nullptr;
  CUresult status = kCudaSuccess;
  {
    const std::lock_guard lock(mutex_);
    if (CUcontext known = context_.load(std::memory_order_acquire)) return known;
    status = driver_.devicePrimaryCtxRetain(&retained, device_);
    if (status == kCudaSuccess) context_.store(retained, std::memory_order_release);
  }
  check(status, "retaining the device's primary context");
  return retained;
}

CUdeviceptr CudaDevice::alloc(size_t bytes) {
  const CudaCurrent scope = current();
  if (bytes == 0) return 0;
  CUdeviceptr pointer = 0;
  const CUresult status = driver_.memAlloc(&pointer, bytes);
  if (status == kCudaOutOfMemory) {
    size_t free_bytes = 0, total_bytes = 0;
    const bool known = driver_.memGetInfo(&free_bytes, &total_bytes) == kCudaSuccess;
    throw Error(ErrorCode::kOutOfMemory,
                text("cuda:", info_.index, " (", info_.name, "): no memory for ", bytes, " bytes; ",
                     known ? text(free_bytes, " of ", total_bytes, " bytes are free") : std::string("the driver does not say how much is free"),
                     "; free GPU memory or use a smaller problem"));
  }
  check(status, "allocating memory");
  return pointer;
}

void CudaDevice::free(CUdeviceptr pointer) {
  const CudaCurrent scope = current();
  if (pointer != 0) check(driver_.memFree(pointer), "freeing memory");
}

void CudaDevice::memory(size_t& free_bytes, size_t& total_bytes) {
  const CudaCurrent scope = current();
  check(driver_.memGetInfo(&free_bytes, &total_bytes), "asking for the free memory");
}

void CudaDevice::launch(CUfunction function, const CudaLaunch& shape, CUstream stream, void** parameters, const char* name) {
  const CudaCurrent scope = current();
  CUresult status = kCudaSuccess;
  CUlaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (shape.cluster_x * shape.cluster_y * shape.cluster_z != 1) {
    attributes[count].id = CUlaunchAttributeID::kClusterDimension;
    attributes[count++].value.cluster = {shape.cluster_x, shape.cluster_y, shape.cluster_z};
  }
  if (shape.early) {
    attributes[count].id = CUlaunchAttributeID::kProgrammaticStreamSerialization;
    attributes[count++].value.programmatic_stream_serialization = 1;
  }
  if (count == 0) {
    status = driver_.launchKernel(function, shape.grid_x, shape.grid_y, shape.grid_z, shape.block_x, shape.block_y, shape.block_z, shape.shared_bytes,
                                  stream, parameters, nullptr);
  } else {
    const CUlaunchConfig config{shape.grid_x,  shape.grid_y,       shape.grid_z, shape.block_x, shape.block_y,
                                shape.block_z, shape.shared_bytes, stream,       attributes,    count};
    status = driver_.launchKernelEx(&config, function, parameters, nullptr);
  }
  if (status == kCudaSuccess) return;
  const std::string what = text("launching ", name, " (grid ", shape.grid_x, " x ", shape.grid_y, " x ", shape.grid_z, ", block ", shape.block_x,
                                " x ", shape.block_y, " x ", shape.block_z, ", ", shape.shared_bytes, " bytes of shared memory)");
  // The shape is the library's choice, not the caller's.
  if (status == kCudaInvalidValue)
    throw Error(ErrorCode::kDevice, text("cuda:", info_.index, " (", info_.name, "): ", what, " failed: ", cuda_error_text(status)));
  fail(status, what);
}

void CudaDevice::require_on_device(const void* pointer, const char* name) {
  const CudaCurrent scope = current();
  const auto address = static_cast<CUdeviceptr>(reinterpret_cast<uintptr_t>(pointer));
  CUmemorytype type{};
  const CUresult status = driver_.pointerGetAttribute(&type, CUpointer_attribute::kMemoryType, address);
  // The driver does not know memory that it has not allocated or registered.
  if (status == kCudaInvalidValue || (status == kCudaSuccess && type != CUmemorytype::kDevice))
    throw Error(ErrorCode::kInvalidArgument,
                text(name, " is at ", pointer, ", which is memory of the host; its device is cuda:", info_.index, ": give memory of that device"));
  check(status, "asking where a tensor lies");
  int ordinal = -1;
  check(driver_.pointerGetAttribute(&ordinal, CUpointer_attribute::kDeviceOrdinal, address), "asking where a tensor lies");
  if (ordinal == info_.index) return;
  unsigned managed = 0;  // managed memory is at home on every device
  if (driver_.pointerGetAttribute(&managed, CUpointer_attribute::kIsManaged, address) == kCudaSuccess && managed != 0) return;
  throw Error(ErrorCode::kInvalidArgument,
              text(name, " is at ", pointer, ", which is memory of cuda:", ordinal, "; its device is cuda:", info_.index, ": copy it there first"));
}

int cuda_device_count(std::string* reason) {
  const bool forked = cuda_forked();
  if (reason) *reason = forked ? kForked : devices().reason;
  return forked ? 0 : static_cast<int>(devices().all.size());
}

CudaDevice& cuda_device(int index) {
  if (cuda_forked()) throw Error(ErrorCode::kDevice, kForked);
  const Devices& found = devices();
  if (found.all.empty()) throw Error(ErrorCode::kUnsupported, found.reason);
  if (index < 0 || static_cast<size_t>(index) >= found.all.size())
    throw Error(ErrorCode::kInvalidArgument, text("CUDA device ", index, "; allowed: 0 to ", found.all.size() - 1));
  return *found.all[static_cast<size_t>(index)];
}

bool cuda_forked() { return fork_state().forked.load(std::memory_order_acquire); }

}  // namespace fattn::core
