#include "device/cublaslt.h"

#include <map>
#include <mutex>
#include <utility>

#include "device/dynamic_library.h"
#include "device/toolkit_search.h"
#include "shared/text.h"

namespace fattn::core {
namespace {

constexpr int kOldestMajor = 12;

// Fills `to`, or returns why `library` cannot be used.
std::string bind(const DynamicLibrary& library, CublasLt& to) {
  if (!library) return library.reason();
  std::string missing;
  const auto find = [&]<class Function>(Function& function, const char* symbol) {
    function = library.function<Function>(symbol);
    if (!function && missing.empty()) missing = symbol;
  };
  CublasLt found;
  find(found.getVersion, "cublasLtGetVersion");
  find(found.getStatusName, "cublasLtGetStatusName");
  find(found.create, "cublasLtCreate");
  find(found.matmulDescCreate, "cublasLtMatmulDescCreate");
  find(found.matmulDescDestroy, "cublasLtMatmulDescDestroy");
  find(found.matmulDescSetAttribute, "cublasLtMatmulDescSetAttribute");
  find(found.matrixLayoutCreate, "cublasLtMatrixLayoutCreate");
  find(found.matrixLayoutDestroy, "cublasLtMatrixLayoutDestroy");
  find(found.matrixLayoutSetAttribute, "cublasLtMatrixLayoutSetAttribute");
  find(found.matmulPreferenceCreate, "cublasLtMatmulPreferenceCreate");
  find(found.matmulPreferenceDestroy, "cublasLtMatmulPreferenceDestroy");
  find(found.matmulPreferenceSetAttribute, "cublasLtMatmulPreferenceSetAttribute");
  find(found.matmulAlgoGetHeuristic, "cublasLtMatmulAlgoGetHeuristic");
  find(found.matmul, "cublasLtMatmul");
  if (!missing.empty()) return "it has no function " + missing + ", so it is not cuBLASLt of CUDA 12 or later";
  const auto version = static_cast<int>(found.getVersion());  // 120103 is 12.1.3
  found.major = version / 10000;
  found.minor = version / 100 % 100;
  if (found.major < kOldestMajor) return text("it is cuBLASLt ", found.major, ".", found.minor, "; 12.0 or later is needed");
  found.path = library.file_of("cublasLtGetVersion");
  to = std::move(found);
  return "";
}

struct Handles {
  std::mutex mutex;
  std::map<int, cublasLtHandle> by_device;
};

}  // namespace

CublasLt open_cublaslt(const std::vector<std::string>& candidates) {
  CublasLt found;
  std::string tried;
  for (const std::string& name : candidates) {
    DynamicLibrary library(name);
    const std::string why = bind(library, found);
    if (why.empty()) {
      std::move(library).keep();
      return found;
    }
    tried += text(tried.empty() ? "" : "; ", name, ": ", why);
  }
  found.reason =
      "no usable cuBLASLt (NVIDIA's library of matrix products); install it (the CUDA toolkit, or, in an active virtual environment or with --user, "
      "pip install nvidia-cublas; for drivers before CUDA 13 nvidia-cublas-cu12), or set CUDA_HOME to a toolkit that has lib64/libcublasLt.so.13 or "
      ".12. Tried " +
      tried;
  return found;
}

const CublasLt& cublaslt() {
  static const CublasLt& found = *new CublasLt(
      open_cublaslt(toolkit_candidates("libcublasLt", {"/nvidia/cu13/lib", "/nvidia/cublas/lib"})));  // never destroyed: plans refer to it
  return found;
}

void cublas_check(cublasStatus status, const char* what) {
  if (status == kCublasSuccess) return;
  const char* name = cublaslt() ? cublaslt().getStatusName(status) : nullptr;
  const ErrorCode code = status == kCublasAllocFailed                                     ? ErrorCode::kOutOfMemory
                         : status == kCublasNotSupported || status == kCublasArchMismatch ? ErrorCode::kUnsupported
                                                                                          : ErrorCode::kDevice;
  throw Error(code, text("cuBLASLt ", cublaslt().major, ".", cublaslt().minor, ": ", what, " failed: ", name ? name : "status", " (", status, ")",
                         code == ErrorCode::kOutOfMemory ? "; free memory or use a smaller problem" : ""));
}

cublasLtHandle cublaslt_handle(CudaDevice& device) {
  static Handles& handles = *new Handles;  // never destroyed: the device's state lives as long as the process
  if (!cublaslt()) throw Error(ErrorCode::kUnsupported, cublaslt().reason);
  const CudaCurrent scope = device.current();
  const std::lock_guard lock(handles.mutex);
  cublasLtHandle& handle = handles.by_device[device.index()];
  if (!handle) {
    const cublasStatus status = cublaslt().create(&handle);
    if (status == kCublasNotInitialized)
      throw Error(ErrorCode::kUnsupported,
                  text("cuBLASLt ", cublaslt().major, ".", cublaslt().minor,
                       " does not start on the device: its CUDA runtime and the driver do not go together; use algorithm v2"));
    cublas_check(status, "creating its state for the device");
  }
  return handle;
}

}  // namespace fattn::core
