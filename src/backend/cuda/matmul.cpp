#include "backend/cuda/matmul.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "shared/text.h"

namespace fattn::core::cuda {
namespace {

constexpr int kAlignment = 16;  // bytes: what the fastest kernels ask for
// What an algorithm may use for parts of a sum; most need nothing.
constexpr uint64_t kMostWorkspace = 32 << 20;
constexpr int64_t kMostBatch = std::numeric_limits<int32_t>::max();

CublasType type_of(DType dtype) {
  switch (dtype) {
    case DType::kF32: return CublasType::kF32;
    case DType::kF16: return CublasType::kF16;
    case DType::kBF16: return CublasType::kBF16;
    default: throw Error(ErrorCode::kInternal, "cuBLASLt is used for fp32, fp16 and bf16");
  }
}

bool one_after_the_other(const BatchDimension& outer, const BatchDimension& inner) {
  if (outer.summed || inner.summed || outer.count > kMostBatch / inner.count) return false;
  for (size_t i = 0; i < outer.step.size(); ++i)
    if (outer.step[i] != inner.step[i] * inner.count) return false;
  return true;
}

// The largest power of 2 up to kAlignment that divides what lies between the matrices of an operand.
int alignment_of(const std::vector<BatchDimension>& dimensions, size_t operand, DType dtype, int pointer) {
  int64_t all = pointer;
  for (const BatchDimension& d : dimensions) all = std::gcd(all, d.step[operand] * static_cast<int64_t>(size_of(dtype)));
  return static_cast<int>(all);
}

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kAlignment == 0; }

}  // namespace

std::vector<BatchDimension> batch_dimensions(const MatmulShape& shape) {
  std::vector<BatchDimension> found;
  for (size_t i = 0; i < shape.count.size(); ++i)
    if (shape.count[i] > 1) found.push_back({shape.count[i], {shape.a.step[i], shape.b.step[i], shape.d.step[i]}, shape.d.step[i] == 0});
  for (size_t x = 0; x < found.size(); ++x)
    for (size_t y = 0; y < found.size(); ++y) {
      if (x == y || !one_after_the_other(found[x], found[y])) continue;
      found[y].count *= found[x].count;
      found.erase(found.begin() + static_cast<std::ptrdiff_t>(x));
      x = 0, y = 0;
      if (found.size() < 2) break;
    }
  std::stable_sort(found.begin(), found.end(),
                   [](const BatchDimension& x, const BatchDimension& y) { return x.summed != y.summed ? y.summed : x.count > y.count; });
  if (found.empty() || found.front().summed || found.front().count > kMostBatch) found.insert(found.begin(), BatchDimension{});
  return found;
}

Matmul::Matmul(CudaDevice& device, const MatmulShape& shape) : shape_(shape), dimensions_(batch_dimensions(shape)), handle_(cublaslt_handle(device)) {
  const CublasLt& blas = cublaslt();
  cublasLtMatmulDesc desc = nullptr;
  cublas_check(blas.matmulDescCreate(&desc, CublasCompute::kF32, CublasType::kF32), "describing a product");
  desc_.reset(desc);
  // Row-major d = op(a) op(b) is column-major d^T = op(b)^T op(a)^T, and a row-major matrix is the transpose of a column-major one: b comes first.
  const auto transpose = [&](CublasDescAttribute which, bool transposed) {
    const CublasOp op = transposed ? CublasOp::kTransposed : CublasOp::kPlain;
    cublas_check(blas.matmulDescSetAttribute(desc, which, &op, sizeof op), "describing a product");
  };
  transpose(CublasDescAttribute::kTransA, shape.b.transposed);
  transpose(CublasDescAttribute::kTransB, shape.a.transposed);
  a_ = layout_of(shape.a, shape.m, shape.k, 0);
  b_ = layout_of(shape.b, shape.k, shape.n, 1);
  d_ = layout_of(shape.d, shape.m, shape.n, 2);
  if (!choose(device, kAlignment, aligned_))
    throw Error(ErrorCode::kUnsupported, text("cuBLASLt ", blas.major, ".", blas.minor, " has no algorithm for a product of ", shape.m, " x ",
                                              shape.k, " with ", shape.k, " x ", shape.n, " in ", name_of(shape.a.dtype), "; use algorithm v2"));
  takes_unaligned_ = choose(device, static_cast<int>(size_of(shape.a.dtype)), unaligned_);
}

Matmul::Layout Matmul::layout_of(const MatrixBatch& matrix, int64_t rows, int64_t columns, int operand) const {
  if (matrix.transposed) std::swap(rows, columns);  // as stored
  const CublasLt& blas = cublaslt();
  cublasLtMatrixLayout made = nullptr;
  cublas_check(blas.matrixLayoutCreate(&made, type_of(matrix.dtype), static_cast<uint64_t>(columns), static_cast<uint64_t>(rows),
                                       rows > 1 ? matrix.row : columns),
               "describing a matrix");
  Layout layout(made);
  const auto count = static_cast<int32_t>(dimensions_.front().count);
  const int64_t step = dimensions_.front().step[static_cast<size_t>(operand)];
  cublas_check(blas.matrixLayoutSetAttribute(made, CublasLayoutAttribute::kBatchCount, &count, sizeof count), "describing a batch of matrices");
  cublas_check(blas.matrixLayoutSetAttribute(made, CublasLayoutAttribute::kBatchStride, &step, sizeof step), "describing a batch of matrices");
  return layout;
}

bool Matmul::choose(CudaDevice& device, int alignment, CublasHeuristic& found) const {
  const CublasLt& blas = cublaslt();
  const CudaCurrent scope = device.current();
  struct Destroy {
    void operator()(cublasLtMatmulPreference x) const { cublaslt().matmulPreferenceDestroy(x); }
  };
  cublasLtMatmulPreference made = nullptr;
  cublas_check(blas.matmulPreferenceCreate(&made), "describing what is wanted of a product");
  const Owned<cublasLtMatmulPreference, Destroy> preference(made);
  const auto prefer = [&](CublasPreference what, const auto& value) {
    cublas_check(blas.matmulPreferenceSetAttribute(made, what, &value, sizeof value), "describing what is wanted of a product");
  };
  const auto alignment_in = [&](size_t operand, const MatrixBatch& matrix) {
    const int pointer = std::min<int>(alignment, kAlignment);
    return static_cast<uint32_t>(alignment_of(dimensions_, operand, matrix.dtype, std::max<int>(pointer, static_cast<int>(size_of(matrix.dtype)))));
  };
  prefer(CublasPreference::kMaxWorkspaceBytes, kMostWorkspace);
  prefer(CublasPreference::kReductionMask, kCublasReduceInComputeType);  // else parts of sums might be rounded to 16 bits
  prefer(CublasPreference::kAlignmentA, alignment_in(1, shape_.b));
  prefer(CublasPreference::kAlignmentB, alignment_in(0, shape_.a));
  prefer(CublasPreference::kAlignmentC, alignment_in(2, shape_.d));
  prefer(CublasPreference::kAlignmentD, alignment_in(2, shape_.d));
  int count = 0;
  const cublasStatus status =
      blas.matmulAlgoGetHeuristic(handle_, desc_.get(), b_.get(), a_.get(), d_.get(), d_.get(), preference.get(), 1, &found, &count);
  if (status == kCublasNotSupported) return false;
  cublas_check(status, "asking for the algorithm of a product");
  return count > 0 && found.state == kCublasSuccess;
}

size_t Matmul::workspace_bytes() const { return std::max(aligned_.workspace_bytes, takes_unaligned_ ? unaligned_.workspace_bytes : 0); }

void Matmul::launch(const CublasHeuristic& with, const char* a, const char* b, char* d, bool add, void* workspace, CUstream stream) const {
  const float beta = add ? 1.0f : 0.0f;
  cublas_check(cublaslt().matmul(handle_, desc_.get(), &shape_.alpha, b, b_.get(), a, a_.get(), &beta, d, d_.get(), d, d_.get(), &with.algorithm,
                                 with.workspace_bytes > 0 ? workspace : nullptr, with.workspace_bytes, stream),
               "a product");
}

void Matmul::run(const void* a, const void* b, void* d, void* workspace, CUstream stream) const {
  const bool aligned = is_aligned(a) && is_aligned(b) && is_aligned(d);
  if (!aligned && !takes_unaligned_)
    throw Error(ErrorCode::kUnsupported,
                text("cuBLASLt ", cublaslt().major, ".", cublaslt().minor, " has no algorithm for such a product in memory that is not aligned to ",
                     kAlignment, " bytes; align the tensors, or use algorithm v2"));
  const CublasHeuristic& with = aligned ? aligned_ : unaligned_;
  const std::array<int64_t, 3> bytes{static_cast<int64_t>(size_of(shape_.a.dtype)), static_cast<int64_t>(size_of(shape_.b.dtype)),
                                     static_cast<int64_t>(size_of(shape_.d.dtype))};
  // The first dimension is the launch's; there are at most three more, the summed one last.
  std::array<int64_t, 3> counts{1, 1, 1};
  for (size_t i = 1; i < dimensions_.size(); ++i) counts[i - 1] = dimensions_[i].count;
  const auto offset = [&](size_t operand, const std::array<int64_t, 3>& at) {
    int64_t elements = 0;
    for (size_t i = 1; i < dimensions_.size(); ++i) elements += at[i - 1] * dimensions_[i].step[operand];
    return elements * bytes[operand];
  };
  std::array<int64_t, 3> at{};
  for (at[0] = 0; at[0] < counts[0]; ++at[0])
    for (at[1] = 0; at[1] < counts[1]; ++at[1])
      for (at[2] = 0; at[2] < counts[2]; ++at[2]) {
        bool add = false;
        for (size_t i = 1; i < dimensions_.size(); ++i) add = add || (dimensions_[i].summed && at[i - 1] > 0);
        launch(with, static_cast<const char*>(a) + offset(0, at), static_cast<const char*>(b) + offset(1, at), static_cast<char*>(d) + offset(2, at),
               add, workspace, stream);
      }
}

}  // namespace fattn::core::cuda
