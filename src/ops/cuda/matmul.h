// Products of matrices by cuBLASLt, with bias and GELU where the library has them.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "device/cublaslt.h"
#include "ops/cuda/kernels.h"

namespace fattn::ops::cuda {

// Whose the bias is. What comes after a bias that is added behind the product, the activation, comes behind it, too.
enum class BiasOf { kNobody, kProduct, kWhoAsks };

// c (rows, columns) = activation(alpha a (rows, inner) b (inner, columns) + bias + add), row-major. What is turned lies as its transpose. A stride is
// what lies between rows as they are in memory, in elements; an alignment, in bytes, is that of the first and of the others.
struct MatmulShape {
  int64_t rows = 0, columns = 0, inner = 0;
  bool a_turned = false, b_turned = false;
  DType dtype = DType::kF32, c = DType::kF32;  // dtype: of a and b
  int64_t a_stride = 0, b_stride = 0, c_stride = 0;
  uint32_t a_alignment = 16, b_alignment = 16, c_alignment = 16;
  Activation activation = Activation::kNone;
  BiasOf bias = BiasOf::kNobody;
  auto operator<=>(const MatmulShape&) const = default;
};

// The largest power of 2 up to 16 that divides all of these.
uint32_t alignment_of(std::initializer_list<int64_t> bytes);

class Matmul {
 public:
  // Asks the library for its algorithm. Throws Error(kUnsupported) if it has none.
  Matmul(core::CudaDevice& device, const MatmulShape& shape);

  struct Operands {
    const void *a = nullptr, *b = nullptr;
    const void* bias = nullptr;  // (columns), in the dtype of c; read if adds_bias()
    const void* add = nullptr;   // (rows, columns) as c; may be c. Null: nothing
    void* c = nullptr;
    float alpha = 1;
  };
  static constexpr size_t kMostWorkspace = size_t{32} << 20;
  static constexpr size_t kAlignment = 256;  // of the workspace
  bool adds_bias() const { return bias_; }
  bool activates() const { return activates_; }
  void run(const Operands& operands, void* workspace, core::CUstream stream) const;

 private:
  struct DestroyDesc {
    void operator()(core::cublasLtMatmulDesc x) const { core::cublaslt().matmulDescDestroy(x); }
  };
  struct DestroyLayout {
    void operator()(core::cublasLtMatrixLayout x) const { core::cublaslt().matrixLayoutDestroy(x); }
  };
  template <class Handle, class Destroy>
  using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, Destroy>;
  using Layout = Owned<core::cublasLtMatrixLayout, DestroyLayout>;

  bool choose(core::CudaDevice& device, core::CublasEpilogue epilogue);

  const MatmulShape shape_;
  core::CudaDevice& device_;
  core::cublasLtHandle handle_ = nullptr;
  Owned<core::cublasLtMatmulDesc, DestroyDesc> desc_;
  Layout b_, a_, c_;
  core::CublasHeuristic found_{};
  bool bias_ = false, activates_ = false;
  mutable std::mutex mutex_;  // of the description, which is told where each call's bias is
};

// Those that were asked for, made once.
class Matmuls {
 public:
  explicit Matmuls(core::CudaDevice& device) : device_(device) {}
  std::shared_ptr<const Matmul> of(const MatmulShape& shape) const;

 private:
  core::CudaDevice& device_;
  mutable std::map<MatmulShape, std::shared_ptr<const Matmul>> made_;
  mutable std::mutex mutex_;
};

}  // namespace fattn::ops::cuda
