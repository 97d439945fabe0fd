// The CUDA driver library (libcuda), opened at run time. Its C interface is declared here by ourselves, as far as fattn uses it,
// so that no CUDA toolkit is needed to build: types and values as NVIDIA's driver API reference documents them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "device_abi/tensor_map.h"

namespace fattn::core {

// Handles of the driver. Each is a pointer to something that only the driver sees.
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CudaContextHandle*;
using CUstream = struct CudaStreamHandle*;
using CUevent = struct CudaEventHandle*;
using CUmodule = struct CudaModuleHandle*;
using CUfunction = struct CudaFunctionHandle*;
using CUgraph = struct CudaGraphHandle*;
using CUgraphExec = struct CudaGraphExecHandle*;
using CUresult = int;

// Status codes that fattn tells apart.
inline constexpr CUresult kCudaSuccess = 0;
inline constexpr CUresult kCudaInvalidValue = 1;
inline constexpr CUresult kCudaOutOfMemory = 2;
inline constexpr CUresult kCudaNotInitialized = 3;
inline constexpr CUresult kCudaDeinitialized = 4;
inline constexpr CUresult kCudaStubLibrary = 34;
inline constexpr CUresult kCudaDeviceUnavailable = 46;
inline constexpr CUresult kCudaNoDevice = 100;
inline constexpr CUresult kCudaInvalidDevice = 101;
inline constexpr CUresult kCudaInvalidImage = 200;
inline constexpr CUresult kCudaInvalidContext = 201;
inline constexpr CUresult kCudaNoBinaryForGpu = 209;
inline constexpr CUresult kCudaEccUncorrectable = 214;
inline constexpr CUresult kCudaInvalidPtx = 218;
inline constexpr CUresult kCudaNvlinkUncorrectable = 220;
inline constexpr CUresult kCudaJitCompilerNotFound = 221;
inline constexpr CUresult kCudaUnsupportedPtxVersion = 222;
inline constexpr CUresult kCudaContained = 226;
inline constexpr CUresult kCudaInvalidHandle = 400;
inline constexpr CUresult kCudaNotFound = 500;
inline constexpr CUresult kCudaNotReady = 600;
inline constexpr CUresult kCudaIllegalAddress = 700;
inline constexpr CUresult kCudaLaunchOutOfResources = 701;
inline constexpr CUresult kCudaLaunchTimeout = 702;
inline constexpr CUresult kCudaContextIsDestroyed = 709;
inline constexpr CUresult kCudaAssert = 710;
inline constexpr CUresult kCudaHardwareStackError = 714;
inline constexpr CUresult kCudaIllegalInstruction = 715;
inline constexpr CUresult kCudaMisalignedAddress = 716;
inline constexpr CUresult kCudaInvalidAddressSpace = 717;
inline constexpr CUresult kCudaInvalidPc = 718;
inline constexpr CUresult kCudaLaunchFailed = 719;
inline constexpr CUresult kCudaTensorMemoryLeak = 721;
inline constexpr CUresult kCudaSystemDriverMismatch = 803;
inline constexpr CUresult kCudaCompatNotSupported = 804;
inline constexpr CUresult kCudaMpsClientTerminated = 810;
inline constexpr CUresult kCudaStreamCaptureUnsupported = 900;
inline constexpr CUresult kCudaStreamCaptureWrongThread = 908;
inline constexpr CUresult kCudaExternalDevice = 911;

enum class CUdevice_attribute : int {
  kMaxThreadsPerBlock = 1,
  kSharedPerBlock = 8,
  kWarpSize = 10,
  kClockKhz = 13,
  kMultiprocessors = 16,
  kComputeMode = 20,  // 2: prohibited
  kEccEnabled = 32,
  kPciBusId = 33,
  kPciDeviceId = 34,
  kMemoryClockKhz = 36,
  kMemoryBusBits = 37,
  kL2Bytes = 38,
  kMaxThreadsPerMultiprocessor = 39,
  kPciDomainId = 50,
  kMajor = 75,
  kMinor = 76,
  kSharedPerMultiprocessor = 81,
  kRegistersPerMultiprocessor = 82,
  kSharedPerBlockOptin = 97,
};
enum class CUfunction_attribute : int {
  kMaxThreadsPerBlock = 0,
  kSharedBytes = 1,  // static shared memory
  kConstBytes = 2,
  kLocalBytes = 3,  // local memory a thread: spills and arrays that are no registers
  kRegisters = 4,
  kPtxVersion = 5,
  kBinaryVersion = 6,
  kMaxDynamicSharedBytes = 8,  // to be set before a launch asks for more than 48 KiB
  kPreferredSharedCarveout = 9,
  kNonPortableClusterSize = 14,
};
enum class CUpointer_attribute : int { kMemoryType = 2, kIsManaged = 8, kDeviceOrdinal = 9 };
enum class CUmemorytype : int { kHost = 1, kDevice = 2 };
enum class CUjit_option : int { kInfoLog = 3, kInfoLogBytes = 4, kErrorLog = 5, kErrorLogBytes = 6 };
inline constexpr unsigned kCudaStreamNonBlocking = 1;
enum class CUstreamCaptureMode : int { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };

struct CUuuid {
  unsigned char bytes[16];
};
enum class CUlaunchAttributeID : int { kClusterDimension = 4, kProgrammaticStreamSerialization = 6 };
struct CUlaunchAttribute {
  CUlaunchAttributeID id;
  int padding;
  union {
    char whole[64];
    struct {
      unsigned x, y, z;
    } cluster;
    int programmatic_stream_serialization;
  } value;
};
static_assert(sizeof(CUlaunchAttribute) == 72);
struct CUlaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  CUstream stream;
  CUlaunchAttribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(CUlaunchConfig) == 56);
using CUtensorMap = TensorMap;

[[noreturn]] void throw_missing_function(const char* symbol);

// A function that not every driver has: a call of one that is not there throws Error(kUnsupported) with its name.
template <class Function>
class OptionalFunction;
template <class... Arguments>
class OptionalFunction<CUresult(Arguments...)> {
 public:
  using Pointer = CUresult (*)(Arguments...);
  OptionalFunction() = default;
  OptionalFunction(Pointer pointer, const char* symbol) : pointer_(pointer), symbol_(symbol) {}
  explicit operator bool() const { return pointer_ != nullptr; }
  CUresult operator()(Arguments... arguments) const {
    if (!pointer_) throw_missing_function(symbol_);
    return pointer_(arguments...);
  }

 private:
  Pointer pointer_ = nullptr;
  const char* symbol_ = "";
};

// The functions, named as in the driver API without `cu`; cuda_driver.cpp has the symbols (those with _v2 where the plain
// one is an older interface). Calls check nothing: cuda_check() and CudaDevice::check() turn a status into an Error.
struct CudaDriver {
  CUresult (*init)(unsigned flags) = nullptr;
  CUresult (*driverGetVersion)(int* version) = nullptr;
  CUresult (*getErrorName)(CUresult status, const char** name) = nullptr;
  CUresult (*getErrorString)(CUresult status, const char** text) = nullptr;

  CUresult (*deviceGetCount)(int* count) = nullptr;
  CUresult (*deviceGet)(CUdevice* device, int index) = nullptr;
  CUresult (*deviceGetName)(char* name, int bytes, CUdevice device) = nullptr;
  CUresult (*deviceGetAttribute)(int* value, CUdevice_attribute attribute, CUdevice device) = nullptr;
  CUresult (*deviceTotalMem)(size_t* bytes, CUdevice device) = nullptr;
  OptionalFunction<CUresult(CUuuid* uuid, CUdevice device)> deviceGetUuid;

  CUresult (*devicePrimaryCtxRetain)(CUcontext* context, CUdevice device) = nullptr;
  CUresult (*ctxPushCurrent)(CUcontext context) = nullptr;
  CUresult (*ctxPopCurrent)(CUcontext* context) = nullptr;
  CUresult (*ctxGetCurrent)(CUcontext* context) = nullptr;
  CUresult (*ctxSynchronize)() = nullptr;

  CUresult (*memGetInfo)(size_t* free, size_t* total) = nullptr;
  CUresult (*memAlloc)(CUdeviceptr* pointer, size_t bytes) = nullptr;
  CUresult (*memFree)(CUdeviceptr pointer) = nullptr;
  CUresult (*memHostAlloc)(void** pointer, size_t bytes, unsigned flags) = nullptr;
  CUresult (*memFreeHost)(void* pointer) = nullptr;
  CUresult (*memcpyHtoDAsync)(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) = nullptr;
  CUresult (*memcpyDtoHAsync)(void* to, CUdeviceptr from, size_t bytes, CUstream stream) = nullptr;
  CUresult (*memcpyDtoDAsync)(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) = nullptr;
  CUresult (*memsetD8Async)(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) = nullptr;
  CUresult (*pointerGetAttribute)(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) = nullptr;

  CUresult (*streamCreate)(CUstream* stream, unsigned flags) = nullptr;
  CUresult (*streamDestroy)(CUstream stream) = nullptr;
  CUresult (*streamSynchronize)(CUstream stream) = nullptr;
  CUresult (*streamWaitEvent)(CUstream stream, CUevent event, unsigned flags) = nullptr;
  OptionalFunction<CUresult(CUstream stream, int* status)> streamIsCapturing;
  OptionalFunction<CUresult(CUstream stream, CUstreamCaptureMode mode)> streamBeginCapture;
  OptionalFunction<CUresult(CUstream stream, CUgraph* graph)> streamEndCapture;
  OptionalFunction<CUresult(CUgraphExec* executable, CUgraph graph, unsigned long long flags)> graphInstantiate;
  OptionalFunction<CUresult(CUgraphExec executable, CUstream stream)> graphLaunch;
  OptionalFunction<CUresult(CUgraph graph)> graphDestroy;
  OptionalFunction<CUresult(CUgraphExec executable)> graphExecDestroy;

  CUresult (*eventCreate)(CUevent* event, unsigned flags) = nullptr;
  CUresult (*eventRecord)(CUevent event, CUstream stream) = nullptr;
  CUresult (*eventQuery)(CUevent event) = nullptr;  // kCudaNotReady: not yet
  CUresult (*eventSynchronize)(CUevent event) = nullptr;
  CUresult (*eventElapsedTime)(float* milliseconds, CUevent start, CUevent end) = nullptr;
  CUresult (*eventDestroy)(CUevent event) = nullptr;

  CUresult (*moduleLoadDataEx)(CUmodule* module, const void* image, unsigned count, CUjit_option* options, void** values) = nullptr;
  CUresult (*moduleUnload)(CUmodule module) = nullptr;
  CUresult (*moduleGetFunction)(CUfunction* function, CUmodule module, const char* name) = nullptr;
  CUresult (*funcGetAttribute)(int* value, CUfunction_attribute attribute, CUfunction function) = nullptr;
  CUresult (*funcSetAttribute)(CUfunction function, CUfunction_attribute attribute, int value) = nullptr;
  CUresult (*launchKernel)(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                           unsigned block_z, unsigned shared_bytes, CUstream stream, void** parameters, void** extra) = nullptr;
  OptionalFunction<CUresult(const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra)> launchKernelEx;
  OptionalFunction<CUresult(CUtensorMap* map, int dtype, uint32_t rank, void* address, const uint64_t* sizes, const uint64_t* strides,
                            const uint32_t* box, const uint32_t* element_strides, int interleave, int swizzle, int l2_promotion,
                            int out_of_bounds_fill)>
      tensorMapEncodeTiled;

  int version = 0;     // newest CUDA that the driver knows: 13000 is 13.0
  std::string path;    // what was opened
  std::string reason;  // why it cannot be used and what to do; empty if it can
  explicit operator bool() const { return reason.empty(); }
};

// CUDA 12.0 is the oldest whose libnvrtc fattn uses; cubins need a driver as new.
inline constexpr int kOldestCudaDriver = 12000;

// Opened at the first call (FATTN_CUDA_DRIVER is read then), kept for the life of the process. Nothing is initialised by it:
// that is cuda_device_count()'s (cuda_device.h), so that a process may look for the library and fork afterwards.
const CudaDriver& cuda_driver();

std::string cuda_version_text(int version);  // 12080: "12.8"

}  // namespace fattn::core
