// Names for the values of the C ABI, and the tensor view.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "fattn/error.hpp"
#include "fattn/fattn.h"

namespace fattn {

enum class DType : int32_t {
  kF32 = FATTN_F32,
  kF16 = FATTN_F16,
  kBF16 = FATTN_BF16,
  kF64 = FATTN_F64,
  kI32 = FATTN_I32,
  kU8 = FATTN_U8,
  kI64 = FATTN_I64,
};
enum class Backend : int32_t {
  kAuto = FATTN_BACKEND_AUTO,
  kReference = FATTN_BACKEND_REFERENCE,
  kCpu = FATTN_BACKEND_CPU,
  kCuda = FATTN_BACKEND_CUDA,
};
enum class Algorithm : int32_t {
  kAuto = FATTN_ALGORITHM_AUTO,
  kStandard = FATTN_ALGORITHM_STANDARD,
  kV2 = FATTN_ALGORITHM_V2,
  kV3 = FATTN_ALGORITHM_V3,
  kV1 = FATTN_ALGORITHM_V1,
};
enum class Check : int32_t { kAuto = FATTN_CHECK_AUTO, kNone = FATTN_CHECK_NONE, kSync = FATTN_CHECK_SYNC };
enum class Device : int32_t { kCpu = FATTN_DEVICE_CPU, kCuda = FATTN_DEVICE_CUDA };
enum class Isa : int32_t {
  kAuto = FATTN_ISA_AUTO,
  kScalar = FATTN_ISA_SCALAR,
  kAvx2 = FATTN_ISA_AVX2,
  kAvx512 = FATTN_ISA_AVX512,
  kAvx512Bf16 = FATTN_ISA_AVX512_BF16,
  kAmx = FATTN_ISA_AMX,
  kNeon = FATTN_ISA_NEON,
};

constexpr size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kF64:
    case DType::kI64: return 8;
    case DType::kF32:
    case DType::kI32: return 4;
    case DType::kF16:
    case DType::kBF16: return 2;
    case DType::kU8: return 1;
  }
  return 0;
}
constexpr const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kF64: return "fp64";
    case DType::kF32: return "fp32";
    case DType::kF16: return "fp16";
    case DType::kBF16: return "bf16";
    case DType::kI32: return "int32";
    case DType::kU8: return "uint8";
    case DType::kI64: return "int64";
  }
  return "unknown";
}
constexpr const char* name_of(Backend backend) {
  switch (backend) {
    case Backend::kAuto: return "auto";
    case Backend::kReference: return "reference";
    case Backend::kCpu: return "cpu";
    case Backend::kCuda: return "cuda";
  }
  return "unknown";
}
constexpr const char* name_of(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kAuto: return "auto";
    case Algorithm::kStandard: return "standard";
    case Algorithm::kV2: return "v2";
    case Algorithm::kV3: return "v3";
    case Algorithm::kV1: return "v1";
  }
  return "unknown";
}
constexpr const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::kAuto: return "auto";
    case Isa::kScalar: return "scalar";
    case Isa::kAvx2: return "avx2";
    case Isa::kAvx512: return "avx512";
    case Isa::kAvx512Bf16: return "avx512_bf16";
    case Isa::kAmx: return "amx";
    case Isa::kNeon: return "neon";
  }
  return "unknown";
}

// A view: pointer, dtype, shape and strides in elements. Owns nothing. A default-constructed Tensor is absent.
class Tensor {
 public:
  Tensor() = default;
  // Contiguous, row-major. At most 4 dimensions.
  Tensor(const void* data, DType dtype, std::initializer_list<int64_t> shape) {
    if (shape.size() > 4)
      invalid("a fattn::Tensor is made with " + std::to_string(shape.size()) + " dimensions; allowed: up to 4. Merge some of them");
    raw_.data = const_cast<void*>(data);
    raw_.dtype = static_cast<int32_t>(dtype);
    for (int64_t n : shape) raw_.shape[raw_.ndim++] = n;
    // Unsigned, so that a product beyond 2^63 wraps instead of being undefined; the library refuses such shapes.
    uint64_t stride = 1;
    for (int i = raw_.ndim; i-- > 0;) {
      raw_.strides[i] = static_cast<int64_t>(stride);
      stride *= static_cast<uint64_t>(raw_.shape[i] > 0 ? raw_.shape[i] : 1);
    }
  }
  Tensor(const void* data, DType dtype, std::initializer_list<int64_t> shape, std::initializer_list<int64_t> strides) : Tensor(data, dtype, shape) {
    if (strides.size() != shape.size())
      invalid("a fattn::Tensor is made with " + std::to_string(shape.size()) + " dimensions and " + std::to_string(strides.size()) +
              " strides; allowed: as many. Give each dimension its stride, in elements");
    int i = 0;
    for (int64_t s : strides) raw_.strides[i++] = s;
  }

  void* data() const { return raw_.data; }
  DType dtype() const { return static_cast<DType>(raw_.dtype); }
  int ndim() const { return raw_.ndim; }
  int64_t shape(int i) const { return raw_.shape[i]; }
  int64_t stride(int i) const { return raw_.strides[i]; }
  int64_t size() const {  // number of elements; 0 if absent
    int64_t n = raw_.ndim > 0 ? 1 : 0;
    for (int i = 0; i < raw_.ndim; ++i) n *= raw_.shape[i];
    return n;
  }
  // The same memory with two dimensions swapped: (batch, heads, seqlen, headdim) <-> (batch, seqlen, heads, headdim).
  Tensor transposed(int a, int b) const {
    if (a < 0 || b < 0 || a >= ndim() || b >= ndim())
      invalid("transposed(" + std::to_string(a) + ", " + std::to_string(b) + ") of a fattn::Tensor of " + std::to_string(ndim()) +
              " dimensions; they are counted from 0");
    Tensor t = *this;
    t.raw_.shape[a] = raw_.shape[b];
    t.raw_.shape[b] = raw_.shape[a];
    t.raw_.strides[a] = raw_.strides[b];
    t.raw_.strides[b] = raw_.strides[a];
    return t;
  }
  // The same view of memory at `data` on another device.
  Tensor on(Device device, int index, const void* data) const {
    Tensor t = *this;
    t.raw_.device_type = static_cast<int32_t>(device);
    t.raw_.device_index = index;
    t.raw_.data = const_cast<void*>(data);
    return t;
  }
  Device device() const { return static_cast<Device>(raw_.device_type); }
  int device_index() const { return raw_.device_index; }
  explicit operator bool() const { return raw_.ndim > 0; }
  const fattn_tensor& raw() const { return raw_; }

 private:
  [[noreturn]] static void invalid(const std::string& message) { throw Error(ErrorCode::kInvalidArgument, message); }

  fattn_tensor raw_{};
};

}  // namespace fattn
