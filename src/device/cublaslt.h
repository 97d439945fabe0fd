// NVIDIA's library of matrix products (libcublasLt), opened at run time. Its C interface is declared here by ourselves, as far as fattn uses it:
// types and values as NVIDIA's cuBLAS documentation and the library's interface have them, the same in CUDA 12 and 13.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "device/cuda_device.h"

namespace fattn::core {

using cublasStatus = int;
inline constexpr cublasStatus kCublasSuccess = 0;
inline constexpr cublasStatus kCublasNotInitialized = 1;
inline constexpr cublasStatus kCublasAllocFailed = 3;
inline constexpr cublasStatus kCublasArchMismatch = 8;
inline constexpr cublasStatus kCublasNotSupported = 15;

using cublasLtHandle = struct CublasLtHandleBody*;
using cublasLtMatmulDesc = struct CublasLtMatmulDescBody*;
using cublasLtMatrixLayout = struct CublasLtMatrixLayoutBody*;
using cublasLtMatmulPreference = struct CublasLtMatmulPreferenceBody*;

enum class CublasType : int { kF32 = 0, kF16 = 2, kBF16 = 14 };
enum class CublasCompute : int { kF32 = 68 };  // sums in fp32, of fp32 products where the inputs are fp32: no TF32
enum class CublasOp : int32_t { kPlain = 0, kTransposed = 1 };
enum class CublasDescAttribute : int { kTransA = 3, kTransB = 4, kEpilogue = 7, kBias = 8, kBiasType = 26 };
// What is done with a product before it is written; the bias is along the rows of d, GELU in its tanh form.
enum class CublasEpilogue : uint32_t { kNone = 1, kBias = 4, kGelu = 32, kGeluBias = 36 };
enum class CublasLayoutAttribute : int { kBatchCount = 5, kBatchStride = 6 };
enum class CublasPreference : int { kMaxWorkspaceBytes = 1, kReductionMask = 3, kAlignmentA = 5, kAlignmentB = 6, kAlignmentC = 7, kAlignmentD = 8 };
inline constexpr uint32_t kCublasReduceInComputeType = 2;  // parts of a sum are added in fp32

// What the heuristics chose: to be handed on as it is.
struct CublasAlgorithm {
  uint64_t data[8];
};
struct CublasHeuristic {
  CublasAlgorithm algorithm;
  size_t workspace_bytes;
  cublasStatus state;
  float waves;
  int reserved[4];
};
static_assert(sizeof(CublasHeuristic) == 96);

// The functions, named as in the library without `cublasLt`. Calls check nothing: cublas_check() turns a status into an Error. Matrices are
// column-major: a row-major matrix is its transpose.
struct CublasLt {
  size_t (*getVersion)() = nullptr;
  const char* (*getStatusName)(cublasStatus status) = nullptr;
  cublasStatus (*create)(cublasLtHandle* handle) = nullptr;
  cublasStatus (*matmulDescCreate)(cublasLtMatmulDesc* desc, CublasCompute compute, CublasType scale) = nullptr;
  cublasStatus (*matmulDescDestroy)(cublasLtMatmulDesc desc) = nullptr;
  cublasStatus (*matmulDescSetAttribute)(cublasLtMatmulDesc desc, CublasDescAttribute what, const void* value, size_t bytes) = nullptr;
  cublasStatus (*matrixLayoutCreate)(cublasLtMatrixLayout* layout, CublasType type, uint64_t rows, uint64_t columns, int64_t ld) = nullptr;
  cublasStatus (*matrixLayoutDestroy)(cublasLtMatrixLayout layout) = nullptr;
  cublasStatus (*matrixLayoutSetAttribute)(cublasLtMatrixLayout layout, CublasLayoutAttribute what, const void* value, size_t bytes) = nullptr;
  cublasStatus (*matmulPreferenceCreate)(cublasLtMatmulPreference* preference) = nullptr;
  cublasStatus (*matmulPreferenceDestroy)(cublasLtMatmulPreference preference) = nullptr;
  cublasStatus (*matmulPreferenceSetAttribute)(cublasLtMatmulPreference preference, CublasPreference what, const void* value, size_t bytes) = nullptr;
  cublasStatus (*matmulAlgoGetHeuristic)(cublasLtHandle handle, cublasLtMatmulDesc desc, cublasLtMatrixLayout a, cublasLtMatrixLayout b,
                                         cublasLtMatrixLayout c, cublasLtMatrixLayout d, cublasLtMatmulPreference preference, int wanted,
                                         CublasHeuristic* found, int* count) = nullptr;
  // d = alpha a b + beta c; alpha and beta are floats of the host.
  cublasStatus (*matmul)(cublasLtHandle handle, cublasLtMatmulDesc desc, const void* alpha, const void* a, cublasLtMatrixLayout layout_a,
                         const void* b, cublasLtMatrixLayout layout_b, const void* beta, const void* c, cublasLtMatrixLayout layout_c, void* d,
                         cublasLtMatrixLayout layout_d, const CublasAlgorithm* algorithm, void* workspace, size_t workspace_bytes,
                         CUstream stream) = nullptr;

  int major = 0, minor = 0;
  std::string path, reason;  // what was opened; why nothing was and what to do
  explicit operator bool() const { return reason.empty(); }
};

// Opened at the first call, kept for the life of the process. Looked for as NVRTC is (toolkit_search.h); what the process has loaded already
// (torch's) is found by its name.
const CublasLt& cublaslt();

// The first of these that can be used; else a reason.
CublasLt open_cublaslt(const std::vector<std::string>& candidates);

// Throws unless status is kCublasSuccess: `what` is what was being done, for people. kOutOfMemory, kUnsupported or kDevice.
void cublas_check(cublasStatus status, const char* what);

// The library's state for a device, made at the first call and kept. Throws kUnsupported if there is no library.
cublasLtHandle cublaslt_handle(CudaDevice& device);

}  // namespace fattn::core
