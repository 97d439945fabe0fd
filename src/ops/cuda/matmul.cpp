#include "ops/cuda/matmul.h"

#include <vector>

#include "fattn/error.hpp"
#include "shared/text.h"

namespace fattn::ops::cuda {
namespace {

using core::cublas_check;
using core::CublasDescAttribute;
using core::CublasEpilogue;
using core::cublaslt;
using core::CublasType;
using core::text;

constexpr uint32_t kAlignment = 16;  // of matrices, at most
constexpr size_t kMostMatmuls = 256;

CublasType type_of(DType dtype) { return dtype == DType::kF32 ? CublasType::kF32 : dtype == DType::kF16 ? CublasType::kF16 : CublasType::kBF16; }

core::cublasLtMatrixLayout layout_of(DType dtype, int64_t rows, int64_t columns, int64_t stride) {
  core::cublasLtMatrixLayout made = nullptr;
  cublas_check(cublaslt().matrixLayoutCreate(&made, type_of(dtype), static_cast<uint64_t>(rows), static_cast<uint64_t>(columns), stride),
               "describing a matrix");
  return made;
}

}  // namespace

uint32_t alignment_of(std::initializer_list<int64_t> bytes) {
  uint32_t alignment = kAlignment;
  for (const int64_t each : bytes)
    while (each % alignment != 0) alignment /= 2;
  return alignment;
}

// The library's matrices are column-major: c^T (columns, rows) = b^T (columns, inner) a^T (inner, rows).
Matmul::Matmul(core::CudaDevice& device, const MatmulShape& s)
    : shape_(s),
      device_(device),
      handle_(core::cublaslt_handle(device)),
      b_(s.b_turned ? layout_of(s.dtype, s.inner, s.columns, s.b_stride) : layout_of(s.dtype, s.columns, s.inner, s.b_stride)),
      a_(s.a_turned ? layout_of(s.dtype, s.rows, s.inner, s.a_stride) : layout_of(s.dtype, s.inner, s.rows, s.a_stride)),
      c_(layout_of(s.c, s.columns, s.rows, s.c_stride)) {
  const bool bias = s.bias == BiasOf::kProduct;
  const bool gelu = s.activation == Activation::kGeluTanh && s.bias != BiasOf::kWhoAsks;  // the library's has this form
  if (bias && gelu && choose(device, CublasEpilogue::kGeluBias)) {
    bias_ = activates_ = true;
  } else if (!bias && gelu && choose(device, CublasEpilogue::kGelu)) {
    activates_ = true;
  } else if (bias && choose(device, CublasEpilogue::kBias)) {
    bias_ = true;
  } else if (!choose(device, CublasEpilogue::kNone)) {
    throw Error(ErrorCode::kUnsupported, text("cuBLASLt ", cublaslt().major, ".", cublaslt().minor, " has no algorithm for a product of ", s.rows,
                                              " x ", s.inner, " and ", s.inner, " x ", s.columns, " in ", name_of(s.dtype)));
  }
  if (s.activation == Activation::kNone) activates_ = true;
}

bool Matmul::choose(core::CudaDevice& device, CublasEpilogue epilogue) {
  const core::CudaCurrent scope = device.current();
  core::cublasLtMatmulDesc desc = nullptr;
  cublas_check(cublaslt().matmulDescCreate(&desc, core::CublasCompute::kF32, CublasType::kF32), "describing a product");
  desc_.reset(desc);
  const auto turn = [&](CublasDescAttribute which, bool transposed) {
    const core::CublasOp op = transposed ? core::CublasOp::kTransposed : core::CublasOp::kPlain;
    cublas_check(cublaslt().matmulDescSetAttribute(desc, which, &op, sizeof op), "describing a product");
  };
  turn(CublasDescAttribute::kTransA, shape_.b_turned);
  turn(CublasDescAttribute::kTransB, shape_.a_turned);
  const auto describe = [&](CublasDescAttribute what, const auto& value) {
    return cublaslt().matmulDescSetAttribute(desc_.get(), what, &value, sizeof value) == core::kCublasSuccess;
  };
  if (!describe(CublasDescAttribute::kEpilogue, epilogue)) return false;
  const CublasType type = type_of(shape_.c);
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
  prefer(core::CublasPreference::kMaxWorkspaceBytes, uint64_t{kMostWorkspace});
  prefer(core::CublasPreference::kReductionMask, core::kCublasReduceInComputeType);  // else parts of sums might be rounded to 16 bits
  prefer(core::CublasPreference::kAlignmentA, shape_.b_alignment);
  prefer(core::CublasPreference::kAlignmentB, shape_.a_alignment);
  prefer(core::CublasPreference::kAlignmentC, shape_.c_alignment);
  prefer(core::CublasPreference::kAlignmentD, shape_.c_alignment);
  int count = 0;
  const core::cublasStatus status =
      cublaslt().matmulAlgoGetHeuristic(handle_, desc_.get(), b_.get(), a_.get(), c_.get(), c_.get(), made, 1, &found_, &count);
  if (status != core::kCublasSuccess && epilogue != CublasEpilogue::kNone) return false;
  if (status == core::kCublasNotSupported) return false;
  cublas_check(status, "asking for the algorithm of a product");
  return count > 0 && found_.state == core::kCublasSuccess;
}

void Matmul::run(const Operands& o, void* workspace, core::CUstream stream) const {
  const core::CudaCurrent scope = device_.current();
  const float beta = o.add ? 1.0f : 0.0f;
  const void* add = o.add ? o.add : o.c;
  const std::lock_guard lock(mutex_);
  if (bias_) cublas_check(cublaslt().matmulDescSetAttribute(desc_.get(), CublasDescAttribute::kBias, &o.bias, sizeof o.bias), "describing a product");
  cublas_check(cublaslt().matmul(handle_, desc_.get(), &o.alpha, o.b, b_.get(), o.a, a_.get(), &beta, add, c_.get(), o.c, c_.get(), &found_.algorithm,
                                 found_.workspace_bytes > 0 ? workspace : nullptr, found_.workspace_bytes, stream),
               "a product");
}

std::shared_ptr<const Matmul> Matmuls::of(const MatmulShape& shape) const {
  const std::lock_guard lock(mutex_);
  const auto found = made_.find(shape);
  if (found != made_.end()) return found->second;
  const auto fresh = std::make_shared<const Matmul>(device_, shape);
  if (made_.size() >= kMostMatmuls) made_.clear();
  return made_[shape] = fresh;
}

}  // namespace fattn::ops::cuda
