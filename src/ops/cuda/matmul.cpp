#include "ops/cuda/matmul.h"

#include <vector>

#include "fattn/error.hpp"
#include "ops/cuda/product.h"
#include "shared/text.h"

namespace fattn::ops::cuda {
namespace {

using core::cublas_check;
using core::CublasDescAttribute;
using core::CublasEpilogue;
using core::cublaslt;
using core::CublasType;
using core::text;

constexpr uint32_t kAlignment = 16;

CublasType type_of(DType dtype) { return dtype == DType::kF32 ? CublasType::kF32 : dtype == DType::kF16 ? CublasType::kF16 : CublasType::kBF16; }

core::cublasLtMatrixLayout layout_of(DType dtype, int64_t rows, int64_t columns, int64_t stride) {
  core::cublasLtMatrixLayout made = nullptr;
  cublas_check(cublaslt().matrixLayoutCreate(&made, type_of(dtype), static_cast<uint64_t>(rows), static_cast<uint64_t>(columns), stride),
               "describing a matrix");
  return made;
}

// The largest power of 2 up to kAlignment that rows of so many bytes begin at.
uint32_t alignment_of(int64_t row_bytes) {
  uint32_t alignment = kAlignment;
  while (row_bytes % alignment != 0) alignment /= 2;
  return alignment;
}

}  // namespace

// The library's matrices are column-major: y^T (out, rows) = weight (out, in) x^T (in, rows).
Matmul::Matmul(core::CudaDevice& device, const Linear& p, int64_t rows, BiasOf whose)
    : problem_(p),
      handle_(core::cublaslt_handle(device)),
      weight_(layout_of(p.dtype, p.in, p.out, packed_stride(p))),
      x_(layout_of(p.dtype, p.in, rows, p.in)),
      y_(layout_of(p.y, p.out, rows, p.out)) {
  const bool bias = whose == BiasOf::kProduct;
  const bool gelu = p.activation == Activation::kGeluTanh && whose != BiasOf::kWhoAsks;  // the library's has this form
  if (bias && gelu && choose(device, CublasEpilogue::kGeluBias)) {
    bias_ = activates_ = true;
  } else if (!bias && gelu && choose(device, CublasEpilogue::kGelu)) {
    activates_ = true;
  } else if (bias && choose(device, CublasEpilogue::kBias)) {
    bias_ = true;
  } else if (!choose(device, CublasEpilogue::kNone)) {
    throw Error(ErrorCode::kUnsupported, text("cuBLASLt ", cublaslt().major, ".", cublaslt().minor, " has no algorithm for ", rows, " rows of ", p.in,
                                              " with a weight of ", p.out, " x ", p.in, " in ", name_of(p.dtype)));
  }
  if (p.activation == Activation::kNone) activates_ = true;
}

bool Matmul::choose(core::CudaDevice& device, CublasEpilogue epilogue) {
  const core::CudaCurrent scope = device.current();
  core::cublasLtMatmulDesc desc = nullptr;
  cublas_check(cublaslt().matmulDescCreate(&desc, core::CublasCompute::kF32, CublasType::kF32), "describing a product");
  desc_.reset(desc);
  const core::CublasOp transposed = core::CublasOp::kTransposed;
  cublas_check(cublaslt().matmulDescSetAttribute(desc, CublasDescAttribute::kTransA, &transposed, sizeof transposed), "describing a product");
  const auto describe = [&](CublasDescAttribute what, const auto& value) {
    return cublaslt().matmulDescSetAttribute(desc_.get(), what, &value, sizeof value) == core::kCublasSuccess;
  };
  if (!describe(CublasDescAttribute::kEpilogue, epilogue)) return false;
  const CublasType type = type_of(problem_.y);
  const void* anywhere = nullptr;
  if (epilogue == CublasEpilogue::kBias || epilogue == CublasEpilogue::kGeluBias)
    if (!describe(CublasDescAttribute::kBiasType, type) || !describe(CublasDescAttribute::kBias, anywhere)) return false;
  struct Destroy {
    void operator()(core::cublasLtMatmulPreference x) const { cublaslt().matmulPreferenceDestroy(x); }
  };
  core::cublasLtMatmulPreference made = nullptr;
  cublas_check(cublaslt().matmulPreferenceCreate(&made), "describing what is wanted of a product");
  const Owned<core::cublasLtMatmulPreference, Destroy> preference(made);
  const auto prefer = [&](core::CublasPreference what, const auto& value) {
    cublas_check(cublaslt().matmulPreferenceSetAttribute(made, what, &value, sizeof value), "describing what is wanted of a product");
  };
  const uint32_t of_x = alignment_of(problem_.in * static_cast<int64_t>(size_of(problem_.dtype)));
  const uint32_t of_y = alignment_of(problem_.out * static_cast<int64_t>(size_of(problem_.y)));
  prefer(core::CublasPreference::kMaxWorkspaceBytes, uint64_t{kMostWorkspace});
  prefer(core::CublasPreference::kReductionMask, core::kCublasReduceInComputeType);  // else parts of sums might be rounded to 16 bits
  prefer(core::CublasPreference::kAlignmentA, kAlignment);
  prefer(core::CublasPreference::kAlignmentB, of_x);
  prefer(core::CublasPreference::kAlignmentC, of_y);
  prefer(core::CublasPreference::kAlignmentD, of_y);
  int count = 0;
  const core::cublasStatus status =
      cublaslt().matmulAlgoGetHeuristic(handle_, desc_.get(), weight_.get(), x_.get(), y_.get(), y_.get(), made, 1, &found_, &count);
  if (status != core::kCublasSuccess && epilogue != CublasEpilogue::kNone) return false;
  if (status == core::kCublasNotSupported) return false;
  cublas_check(status, "asking for the algorithm of a product");
  return count > 0 && found_.state == core::kCublasSuccess;
}

void Matmul::run(const void* x, const void* weight, const void* bias, void* y, void* workspace, core::CUstream stream) const {
  const float alpha = 1, beta = problem_.accumulate ? 1.0f : 0.0f;
  const std::lock_guard lock(mutex_);
  if (bias_) cublas_check(cublaslt().matmulDescSetAttribute(desc_.get(), CublasDescAttribute::kBias, &bias, sizeof bias), "describing a product");
  cublas_check(cublaslt().matmul(handle_, desc_.get(), &alpha, weight, weight_.get(), x, x_.get(), &beta, y, y_.get(), y, y_.get(), &found_.algorithm,
                                 found_.workspace_bytes > 0 ? workspace : nullptr, found_.workspace_bytes, stream),
               "a product");
}

}  // namespace fattn::ops::cuda
