// The kernels of operations on a GPU: what tells one from another, their source, how they are launched.
#pragma once

#include <cstdint>
#include <string_view>

#include "device/cuda_device.h"
#include "jit/jit.h"
#include "ops/ops.h"

namespace fattn::ops::cuda {

// Made by cmake/embed_sources.cmake: kernels/ops and what it stands on, kernels/ops/planned.txt.
core::jit::Sources embedded_sources();
std::string_view embedded_planned();

// Attention's kinds (backend/cuda/kernel_kind.h) are below.
enum class KernelKind : uint32_t {
  kEmbedding = 1000,
  kNorm,
  kKeysValues,
  kProduct,
  kBias,
  kLoss,
  kDraw,
  // Training.
  kConvert,
  kColumnSums,
  kJoinSums,
  kActivate,
  kNormGradient,
  kEmbeddingGradient,
  kRotary,
  kDropout,
  kLossGradient,
  kLossSums,
  kSquareSum,
  kJoinSquares,
  kAdamW
};

// What a product writes: in the dtype of x, fp32, added to fp32.
enum class ProductY : int32_t { kElement, kSingle, kAdded };

// 64 bytes without padding. What a kind does not have is 0.
struct KernelKey {
  KernelKind kind{};
  int32_t arch = 0;
  int32_t dtype = 0;
  int32_t in = 0;  // width
  int32_t rows = 0, shares = 0;
  ProductY y{};
  int32_t activation = 0;
  int16_t norm = 0, keys_values = 0, several = 0, add = 0, warps = 0, held = 0, ctas = 0, reserved = 0;
  int32_t rotary = 0, wide = 0;
  int32_t to = 0, gradient = 0;  // to: dtype
  bool operator==(const KernelKey&) const = default;
};
static_assert(sizeof(KernelKey) == 64);

core::jit::Request request_of(const KernelKey& key);
// Whether a kernel is of a dtype: the others are of fp32, or of float64, and have none in their key.
bool has_element(KernelKind kind);

// A device, as plans keep it.
class Gpu {
 public:
  // Throws Error(kUnsupported) if it is older than compute capability 8.0.
  explicit Gpu(const Device& device);

  core::CudaDevice& device() const { return device_; }
  int arch() const { return arch_; }
  int multiprocessors() const { return device_.info().multiprocessors; }
  int shared_bytes() const { return device_.info().shared_per_block_optin; }

  // Of this device; `dtype` only where kernels of the kind have one.
  KernelKey key_of(KernelKind kind, DType dtype = DType::kF32) const;
  // Compiles and loads, so that launches need not.
  void load(const KernelKey& key) const;
  // `params` is the kernel's one argument.
  void launch(const KernelKey& key, int64_t grid, int threads, int shared_bytes, const void* params, void* stream, int64_t grid_y = 1) const;

 private:
  core::CudaDevice& device_;
  int arch_;
};

inline core::CUstream stream_of(void* stream) { return static_cast<core::CUstream>(stream); }

}  // namespace fattn::ops::cuda
