// An owned torch tensor, and the view of it that fattn takes.
#pragma once

#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "fattn/types.hpp"
#include "torch/shim.h"

namespace fattn::torch {

// torch has printed the reason by then.
inline void check_torch(AOTITorchError error, const char* what) {
  if (error != 0) throw Error(ErrorCode::kInternal, std::string("torch failed at ") + what);
}

inline constexpr const char* kOutOfCudaMemory = "CUDA out of memory";  // as torch says it

class Tensor {
 public:
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {}
  ~Tensor() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }
  Tensor(Tensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Tensor& operator=(Tensor&&) = delete;

  // New memory from torch's allocator on the device of `like`, row-major.
  template <size_t N>
  static Tensor empty(const std::array<int64_t, N>& sizes, int32_t dtype, const Tensor& like) {
    return allocated(sizes, row_major(sizes), dtype, like);
  }
  // The same, sizes being (batch, seqlen, heads, headdim); `bhsd`: the tensor has heads before seqlen, but lies in memory as without.
  static Tensor empty4(std::array<int64_t, 4> sizes, int32_t dtype, const Tensor& like, bool bhsd) {
    std::array<int64_t, 4> strides = row_major(sizes);
    if (bhsd) {
      std::swap(sizes[1], sizes[2]);
      std::swap(strides[1], strides[2]);
    }
    return allocated(sizes, strides, dtype, like);
  }

  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }

  int64_t dim() const { return get<int64_t>(aoti_torch_get_dim, "reading a tensor's rank"); }
  const int64_t* sizes() const { return get<int64_t*>(aoti_torch_get_sizes, "reading a tensor's sizes"); }
  const int64_t* strides() const { return get<int64_t*>(aoti_torch_get_strides, "reading a tensor's strides"); }
  int64_t storage_size() const { return get<int64_t>(aoti_torch_get_storage_size, "reading a storage's size"); }
  int64_t storage_offset() const { return get<int64_t>(aoti_torch_get_storage_offset, "reading a tensor's place in its storage"); }
  int32_t dtype() const { return get<int32_t>(aoti_torch_get_dtype, "reading a tensor's dtype"); }
  int32_t device_type() const { return get<int32_t>(aoti_torch_get_device_type, "reading a tensor's device"); }
  int32_t device_index() const { return get<int32_t>(aoti_torch_get_device_index, "reading a tensor's device index"); }
  bool on_cuda() const { return device_type() == aoti_torch_device_type_cuda(); }
  void* mutable_data() const { return get<void*>(torch_get_mutable_data_ptr, "reading a tensor's address"); }
  const void* data() const { return get<const void*>(torch_get_const_data_ptr, "reading a tensor's address"); }

 private:
  template <size_t N>
  static std::array<int64_t, N> row_major(const std::array<int64_t, N>& sizes) {
    std::array<int64_t, N> strides;
    int64_t stride = 1;
    for (size_t i = N; i-- > 0;) {
      strides[i] = stride;
      stride *= sizes[i] > 0 ? sizes[i] : 1;
    }
    return strides;
  }
  template <size_t N>
  static Tensor allocated(const std::array<int64_t, N>& sizes, const std::array<int64_t, N>& strides, int32_t dtype, const Tensor& like) {
    AtenTensorHandle handle = nullptr;
    const AOTITorchError error =
        aoti_torch_empty_strided(static_cast<int64_t>(N), sizes.data(), strides.data(), dtype, like.device_type(), like.device_index(), &handle);
    if (error != 0) throw no_memory(bytes_of(sizes, dtype), like);
    return Tensor(handle);
  }
  // No more than an int64_t has.
  template <size_t N>
  static int64_t bytes_of(const std::array<int64_t, N>& sizes, int32_t dtype) {
    int64_t bytes = dtype == aoti_torch_dtype_uint8()                                             ? 1
                    : dtype == aoti_torch_dtype_float16() || dtype == aoti_torch_dtype_bfloat16() ? 2
                    : dtype == aoti_torch_dtype_float64()                                         ? 8
                                                                                                  : 4;
    for (const int64_t n : sizes)
      if (__builtin_mul_overflow(bytes, n, &bytes)) return std::numeric_limits<int64_t>::max();
    return bytes;
  }
  // The interface says neither the class of torch's error nor its text: python/fattn/_errors.py asks torch for the same again, and hands its error
  // on. Where no Python of ours is on the way, as in compiled code, programs that look for want of memory know it by torch's words.
  static Error no_memory(int64_t bytes, const Tensor& like) {
    const std::string amount = std::to_string(bytes) + " bytes on ";
    return Error(ErrorCode::kOutOfMemory,
                 like.on_cuda() ? std::string(kOutOfCudaMemory) + ". Tried to allocate " + amount + "cuda:" + std::to_string(like.device_index())
                                : "DefaultCPUAllocator: can't allocate memory: you tried to allocate " + amount + "cpu");
  }
  template <class T>
  T get(AOTITorchError (*function)(AtenTensorHandle, T*), const char* what) const {
    T value{};
    check_torch(function(handle_, &value), what);
    return value;
  }

  AtenTensorHandle handle_;
};

// Of a tensor that is refused for its dtype.
inline Error refused_dtype(const char* name, const Tensor& tensor, const char* allowed) {
  struct Known {
    int32_t (*dtype)();
    const char* name;
  };
  std::string text = std::string(name) + " has ";
  const char* given = nullptr;
  for (const Known& known : {Known{aoti_torch_dtype_bool, "bool"},
                             {aoti_torch_dtype_uint8, "uint8"},
                             {aoti_torch_dtype_int32, "int32"},
                             {aoti_torch_dtype_int64, "int64"},
                             {aoti_torch_dtype_float16, "float16"},
                             {aoti_torch_dtype_bfloat16, "bfloat16"},
                             {aoti_torch_dtype_float32, "float32"},
                             {aoti_torch_dtype_float64, "float64"}})
    if (tensor.dtype() == known.dtype()) given = known.name;
  text += given ? std::string("the dtype ") + given : "a dtype that is not allowed";
  return Error(ErrorCode::kInvalidArgument, text + "; allowed: " + allowed);
}

inline DType dtype_of(const char* name, const Tensor& tensor) {
  const int32_t dtype = tensor.dtype();
  if (dtype == aoti_torch_dtype_float32()) return DType::kF32;
  if (dtype == aoti_torch_dtype_bfloat16()) return DType::kBF16;
  if (dtype == aoti_torch_dtype_float16()) return DType::kF16;
  if (dtype == aoti_torch_dtype_float64()) return DType::kF64;
  throw refused_dtype(name, tensor, "float32, float16, bfloat16, float64");
}

// A storage can be made smaller under a tensor, which would be read behind its end.
inline void require_storage(const char* name, const Tensor& tensor, DType dtype) {
  const int64_t *n = tensor.sizes(), *s = tensor.strides(), dim = tensor.dim();
  int64_t last = tensor.storage_offset();
  for (int64_t i = 0; i < dim; ++i) {
    if (n[i] == 0) return;
    last += (n[i] - 1) * s[i];
  }
  const int64_t needed = (last + 1) * static_cast<int64_t>(size_of(dtype)), there = tensor.storage_size();
  if (there < needed)
    throw Error(ErrorCode::kInvalidArgument, std::string(name) + " reaches to byte " + std::to_string(needed) + " of a storage of " +
                                                 std::to_string(there) + " bytes, which was made smaller since; give it its memory back");
}

inline std::array<int64_t, 4> shape4(const fattn::Tensor& t) { return {t.shape(0), t.shape(1), t.shape(2), t.shape(3)}; }

// Of an input or an output, which differ in whether torch may have to copy shared memory first. lse has 3 dimensions, all else 4; of packed sequences
// 2 and 3. The strides of a tensor without elements reach nothing and mean nothing to torch: it is taken as contiguous, as is a last dimension
// of one element.
inline fattn::Tensor view(const char* name, const Tensor& tensor, const void* data, bool bhsd) {
  const DType dtype = dtype_of(name, tensor);
  require_storage(name, tensor, dtype);
  const int64_t *n = tensor.sizes(), *s = tensor.strides();
  fattn::Tensor host;
  if (const int64_t dim = tensor.dim(); dim == 2) {
    host = fattn::Tensor(data, dtype, {n[0], n[1]});
    if (host.size() > 0) host = fattn::Tensor(data, dtype, {n[0], n[1]}, {s[0], s[1]});
  } else if (dim == 3) {
    host = fattn::Tensor(data, dtype, {n[0], n[1], n[2]});
    if (host.size() > 0) host = fattn::Tensor(data, dtype, {n[0], n[1], n[2]}, {s[0], s[1], n[2] == 1 ? 1 : s[2]});
  } else if (dim == 4) {
    host = fattn::Tensor(data, dtype, {n[0], n[1], n[2], n[3]});
    if (host.size() > 0) host = fattn::Tensor(data, dtype, {n[0], n[1], n[2], n[3]}, {s[0], s[1], s[2], n[3] == 1 ? 1 : s[3]});
    if (bhsd) host = host.transposed(1, 2);
  } else {
    throw Error(ErrorCode::kInvalidArgument,
                std::string(name) + " has " + std::to_string(dim) +
                    " dimensions; allowed: 4 (batch, seqlen, heads, headdim). Add a dimension of 1 where one is missing");
  }
  return tensor.on_cuda() ? host.on(Device::kCuda, tensor.device_index(), data) : host;
}
// Of what stands beside q, k and v: `dtype` as fattn has it, 1 to 4 dimensions in their own order, of which the core checks the number. Strides as in
// `view`.
inline fattn::Tensor beside(const char* name, const Tensor& tensor, const void* data, DType dtype) {
  const int64_t *n = tensor.sizes(), *s = tensor.strides();
  require_storage(name, tensor, dtype);
  const int64_t dim = tensor.dim();
  const bool elements = std::find(n, n + dim, 0) == n + dim;
  fattn::Tensor host;
  switch (dim) {
    case 1: host = elements ? fattn::Tensor(data, dtype, {n[0]}, {s[0]}) : fattn::Tensor(data, dtype, {n[0]}); break;
    case 2: host = elements ? fattn::Tensor(data, dtype, {n[0], n[1]}, {s[0], s[1]}) : fattn::Tensor(data, dtype, {n[0], n[1]}); break;
    case 4:
      host = fattn::Tensor(data, dtype, {n[0], n[1], n[2], n[3]});
      if (elements) host = fattn::Tensor(data, dtype, {n[0], n[1], n[2], n[3]}, {s[0], s[1], s[2], n[3] == 1 ? 1 : s[3]});
      break;
    default: throw Error(ErrorCode::kInvalidArgument, std::string(name) + " has " + std::to_string(dim) + " dimensions; allowed: 1, 2 or 4");
  }
  return tensor.on_cuda() ? host.on(Device::kCuda, tensor.device_index(), data) : host;
}
inline fattn::Tensor input(const char* name, const Tensor& tensor, bool bhsd = false) { return view(name, tensor, tensor.data(), bhsd); }
inline fattn::Tensor output(const char* name, const Tensor& tensor, bool bhsd = false) { return view(name, tensor, tensor.mutable_data(), bhsd); }

}  // namespace fattn::torch
