// Batched matrix products of 16-bit or fp32 tensors with sums in fp32, by cuBLASLt. Planned once, with everything that a launch needs.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "device/cublaslt.h"
#include "fattn/types.hpp"

namespace fattn::core::cuda {

// A row-major matrix for every (batch entry, key head, query head of its group): strides in elements, columns are neighbours. A step of 0: the same
// matrix for all.
struct MatrixBatch {
  DType dtype = DType::kF32;
  bool transposed = false;  // the product takes its transpose
  int64_t row = 0;
  std::array<int64_t, 3> step{};
};

// d (m, n) = alpha op(a) op(b) for all `count` of them; k is what is summed over. Matrices d of one address (a step of 0 and a count above 1) are
// summed up, one after the other.
struct MatmulShape {
  int64_t m = 0, n = 0, k = 0;
  std::array<int64_t, 3> count{1, 1, 1};
  float alpha = 1;
  MatrixBatch a, b, d;
};

// One dimension of the batch: `count` matrices, `step` elements apart in a, b and d.
struct BatchDimension {
  int64_t count = 1;
  std::array<int64_t, 3> step{};
  bool summed = false;
};
// The same products with as few dimensions as strides allow; the first is for one launch, the others are loops, the summed one the innermost.
std::vector<BatchDimension> batch_dimensions(const MatmulShape& shape);

class Matmul {
 public:
  // Asks the library for its algorithm. Throws Error(kUnsupported) if it has none. m, n, k and counts are at least 1.
  Matmul(CudaDevice& device, const MatmulShape& shape);

  size_t workspace_bytes() const;
  // Launches. Allocates nothing; the device's context is current. `workspace` is aligned to 256 bytes.
  void run(const void* a, const void* b, void* d, void* workspace, CUstream stream) const;

  // Whether the library takes such rows: a stride of less than the row is none of a matrix.
  static bool takes(int64_t row, int64_t rows, int64_t columns) { return rows <= 1 || row >= columns; }

 private:
  struct DestroyDesc {
    void operator()(cublasLtMatmulDesc x) const { cublaslt().matmulDescDestroy(x); }
  };
  struct DestroyLayout {
    void operator()(cublasLtMatrixLayout x) const { cublaslt().matrixLayoutDestroy(x); }
  };
  template <class Handle, class Destroy>
  using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, Destroy>;
  using Layout = Owned<cublasLtMatrixLayout, DestroyLayout>;

  Layout layout_of(const MatrixBatch& matrix, int64_t rows, int64_t columns, int operand) const;
  // For pointers that are multiples of `alignment` bytes.
  bool choose(CudaDevice& device, int alignment, CublasHeuristic& found) const;
  void launch(const CublasHeuristic& with, const char* a, const char* b, char* d, bool add, void* workspace, CUstream stream) const;

  MatmulShape shape_;
  std::vector<BatchDimension> dimensions_;
  cublasLtHandle handle_ = nullptr;
  Owned<cublasLtMatmulDesc, DestroyDesc> desc_;
  Layout a_, b_, d_;
  CublasHeuristic aligned_{}, unaligned_{};
  bool takes_unaligned_ = false;
};

}  // namespace fattn::core::cuda
