// Finds libcuda, binds its functions under the names that the driver exports, and says why where it cannot.
#include "device/cuda_driver.h"

#include <unistd.h>

#include <utility>
#include <vector>

#include "device/dynamic_library.h"
#include "fattn/error.hpp"
#include "shared/env.h"
#include "shared/text.h"

namespace fattn::core {
namespace {

// The loader's own folders come first, then those where containers, WSL and NixOS put the driver without telling the loader.
std::vector<std::string> candidates() {
  const std::string wanted = env_value(kEnvCudaDriver);
  if (!wanted.empty()) return {wanted};
  std::vector<std::string> all{"libcuda.so.1"};
  for (const char* path : {"/usr/local/nvidia/lib64/libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1", "/run/opengl-driver/lib/libcuda.so.1"})
    if (access(path, F_OK) == 0) all.emplace_back(path);
  return all;
}

// Takes functions out of a library and remembers the first needed one that it does not have.
class Binder {
 public:
  explicit Binder(const DynamicLibrary& library) : library_(library) {}
  template <class Function>
  void optional(OptionalFunction<Function>& function, const char* symbol) {
    function = {library_.function<Function*>(symbol), symbol};
  }
  template <class Function>
  void operator()(Function& function, const char* symbol) {
    function = library_.function<Function>(symbol);
    if (!function && !missing_) missing_ = symbol;
  }
  const char* missing() const { return missing_; }

 private:
  const DynamicLibrary& library_;
  const char* missing_ = nullptr;
};

// The driver keeps old interfaces under the plain names; _v2 and the like are those that cuda_driver.h declares. Optional is what plain calls
// do without: graphs, clusters, tensor maps, the name of a device.
void bind_all(Binder& bind, CudaDriver& d) {
  bind(d.init, "cuInit");
  bind(d.getErrorName, "cuGetErrorName");
  bind(d.getErrorString, "cuGetErrorString");

  bind(d.deviceGetCount, "cuDeviceGetCount");
  bind(d.deviceGet, "cuDeviceGet");
  bind(d.deviceGetName, "cuDeviceGetName");
  bind(d.deviceGetAttribute, "cuDeviceGetAttribute");
  bind(d.deviceTotalMem, "cuDeviceTotalMem_v2");
  bind.optional(d.deviceGetUuid, "cuDeviceGetUuid_v2");

  bind(d.devicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
  bind(d.ctxPushCurrent, "cuCtxPushCurrent_v2");
  bind(d.ctxPopCurrent, "cuCtxPopCurrent_v2");
  bind(d.ctxGetCurrent, "cuCtxGetCurrent");
  bind(d.ctxSynchronize, "cuCtxSynchronize");

  bind(d.memGetInfo, "cuMemGetInfo_v2");
  bind(d.memAlloc, "cuMemAlloc_v2");
  bind(d.memFree, "cuMemFree_v2");
  bind(d.memHostAlloc, "cuMemHostAlloc");
  bind(d.memFreeHost, "cuMemFreeHost");
  bind(d.memcpyHtoDAsync, "cuMemcpyHtoDAsync_v2");
  bind(d.memcpyDtoHAsync, "cuMemcpyDtoHAsync_v2");
  bind(d.memcpyDtoDAsync, "cuMemcpyDtoDAsync_v2");
  bind(d.memsetD8Async, "cuMemsetD8Async");
  bind(d.pointerGetAttribute, "cuPointerGetAttribute");

  bind(d.streamCreate, "cuStreamCreate");
  bind(d.streamDestroy, "cuStreamDestroy_v2");
  bind(d.streamSynchronize, "cuStreamSynchronize");
  bind(d.streamWaitEvent, "cuStreamWaitEvent");
  bind.optional(d.streamIsCapturing, "cuStreamIsCapturing");
  bind.optional(d.streamBeginCapture, "cuStreamBeginCapture_v2");
  bind.optional(d.streamEndCapture, "cuStreamEndCapture");
  bind.optional(d.graphInstantiate, "cuGraphInstantiateWithFlags");
  bind.optional(d.graphLaunch, "cuGraphLaunch");
  bind.optional(d.graphDestroy, "cuGraphDestroy");
  bind.optional(d.graphExecDestroy, "cuGraphExecDestroy");

  bind(d.eventCreate, "cuEventCreate");
  bind(d.eventRecord, "cuEventRecord");
  bind(d.eventQuery, "cuEventQuery");
  bind(d.eventSynchronize, "cuEventSynchronize");
  bind(d.eventElapsedTime, "cuEventElapsedTime");
  bind(d.eventDestroy, "cuEventDestroy_v2");

  bind(d.moduleLoadDataEx, "cuModuleLoadDataEx");
  bind(d.moduleUnload, "cuModuleUnload");
  bind(d.moduleGetFunction, "cuModuleGetFunction");
  bind(d.funcGetAttribute, "cuFuncGetAttribute");
  bind(d.funcSetAttribute, "cuFuncSetAttribute");
  bind(d.launchKernel, "cuLaunchKernel");
  bind.optional(d.launchKernelEx, "cuLaunchKernelEx");
  bind.optional(d.tensorMapEncodeTiled, "cuTensorMapEncodeTiled");
}

// Fills `driver`, or returns why `library` cannot be used. The version comes first: an old driver also lacks functions.
std::string bind_driver(const DynamicLibrary& library, CudaDriver& driver) {
  if (!library) return library.reason();
  Binder bind(library);
  bind(driver.driverGetVersion, "cuDriverGetVersion");
  if (driver.driverGetVersion) {
    const CUresult status = driver.driverGetVersion(&driver.version);
    if (status == kCudaStubLibrary) return "it is the toolkit's stub for linking, not a driver";
    if (status != kCudaSuccess) return text("cuDriverGetVersion failed with status ", status);
    if (driver.version < kOldestCudaDriver)
      return text("the driver supports CUDA ", cuda_version_text(driver.version), "; fattn needs ", cuda_version_text(kOldestCudaDriver),
                  " (driver 525) or later: update the NVIDIA driver");
  }
  bind_all(bind, driver);
  if (bind.missing()) return text("it has no function ", bind.missing(), ", so it is no CUDA driver that fattn can use");
  driver.path = library.file_of("cuDriverGetVersion");
  return "";
}

CudaDriver open_driver() {
  std::string tried;
  for (const std::string& name : candidates()) {
    DynamicLibrary library(name);
    CudaDriver driver;
    const std::string why = bind_driver(library, driver);
    if (why.empty()) {
      std::move(library).keep();
      return driver;
    }
    // A driver that is there but too old or broken is the reason; other folders that have none are not.
    const bool was_opened = static_cast<bool>(library);
    if (was_opened) tried.clear();
    tried += tried.empty() ? "" : "; ";
    tried += why.rfind(name + ":", 0) == 0 ? why : text(name, ": ", why);  // the loader's messages begin with the name
    if (was_opened) break;
  }
  CudaDriver none;
  // What to do comes first: a caller's buffer may cut the end off.
  none.reason = "no usable CUDA driver; install NVIDIA's driver or set FATTN_CUDA_DRIVER to the absolute path of its libcuda.so.1. Tried " + tried;
  return none;
}

}  // namespace

const CudaDriver& cuda_driver() {
  static const CudaDriver& driver = *new CudaDriver(open_driver());  // never destroyed: modules and devices refer to it
  return driver;
}

void throw_missing_function(const char* symbol) {
  const CudaDriver& driver = cuda_driver();
  throw Error(ErrorCode::kUnsupported, text("the driver ", driver.path, " (CUDA ", cuda_version_text(driver.version), ") has no function ", symbol,
                                            ": update the NVIDIA driver"));
}

std::string cuda_version_text(int version) { return text(version / 1000, ".", version % 1000 / 10); }

}  // namespace fattn::core
