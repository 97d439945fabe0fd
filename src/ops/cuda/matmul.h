// Products of many rows by cuBLASLt, with bias and GELU where the library has them.
#pragma once

#include <memory>
#include <mutex>

#include "device/cublaslt.h"
#include "ops/cuda/kernels.h"

namespace fattn::ops::cuda {

// Whose the bias is. What comes after a bias that is added behind the product, the activation, comes behind it, too.
enum class BiasOf { kNobody, kProduct, kWhoAsks };

// y (rows, out) = activation(x (rows, in) weight^T + bias), of a number of rows. What it does not do itself is left to whoever asks.
class Matmul {
 public:
  // Asks the library for its algorithm. Throws Error(kUnsupported) if it has none.
  Matmul(core::CudaDevice& device, const Linear& problem, int64_t rows, BiasOf bias);

  static constexpr size_t kMostWorkspace = size_t{32} << 20;
  bool adds_bias() const { return bias_; }
  bool activates() const { return activates_; }
  void run(const void* x, const void* weight, const void* bias, void* y, void* workspace, core::CUstream stream) const;

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

  const Linear problem_;
  core::cublasLtHandle handle_ = nullptr;
  Owned<core::cublasLtMatmulDesc, DestroyDesc> desc_;
  Layout weight_, x_, y_;
  core::CublasHeuristic found_{};
  bool bias_ = false, activates_ = false;
  mutable std::mutex mutex_;  // of the description, which is told where each call's bias is
};

}  // namespace fattn::ops::cuda
