#include "problem/tensor_checks.h"

#include "problem/overlap.h"
#include "shared/text.h"

namespace fattn::core {
namespace {

bool known_dtype(int32_t dtype) { return dtype >= FATTN_F32 && dtype <= FATTN_F64; }

std::string device_text(const fattn_tensor& t) { return t.device_type == FATTN_DEVICE_CPU ? "the CPU" : text("CUDA device ", t.device_index); }

}  // namespace

void invalid(const std::string& message) { throw Error(ErrorCode::kInvalidArgument, message); }

std::string shape_text(const fattn_tensor& t) {
  std::string s = "(";
  for (int i = 0; i < t.ndim; ++i) s += (i ? ", " : "") + std::to_string(t.shape[i]);
  return s + ")";
}

std::string dtype_text(const fattn_tensor& t) {
  const auto dtype = static_cast<DType>(t.dtype);
  return size_of(dtype) > 0 ? text(name_of(dtype), " (", t.dtype, ")") : text(t.dtype, " (unknown)");
}

Extent extent_of(const fattn_tensor& t) {
  Extent e;
  e.ndim = t.ndim;
  for (int i = 0; i < t.ndim; ++i) {
    e.shape[i] = t.shape[i];
    e.strides[i] = t.strides[i];
  }
  e.element_size = static_cast<int64_t>(size_of(static_cast<DType>(t.dtype)));
  return e;
}

void check_view(const char* name, const fattn_tensor& t, int ndim, const char* dimensions, bool output) {
  if (t.ndim != ndim)
    invalid(text(name, " has ", t.ndim, " dimensions; allowed: ", ndim, " ", dimensions, ". Add a dimension of 1 where one is missing"));
  const bool on_cpu = t.device_type == FATTN_DEVICE_CPU && t.device_index == 0;
  const bool on_cuda = t.device_type == FATTN_DEVICE_CUDA && t.device_index >= 0;
  if (!on_cpu && !on_cuda)
    invalid(text(name, " is on device type ", t.device_type, ", index ", t.device_index,
                 "; allowed: CPU (0) with index 0, CUDA (1) with the index of a device"));
  for (int i = 0; i < ndim; ++i) {
    if (t.shape[i] < 0) invalid(text(name, " has the shape ", shape_text(t), "; every dimension must be at least 0"));
    if (t.strides[i] < 0)
      invalid(text(name, " has the stride ", t.strides[i], " in dimension ", i, "; strides must be at least 0. Copy the tensor first"));
  }
  if (span_bytes(extent_of(t)) < 0)
    invalid(text(name, " of shape ", shape_text(t), " spans more than 2^63 - 1 bytes with its strides; use a smaller tensor"));
  if (output && overlaps_itself(extent_of(t)))
    invalid(text(name, " is an output whose strides reach one element by two indices (an expanded view?); pass a tensor of its own memory"));
}

void check_tensor(const char* name, const fattn_tensor& t, int ndim, const char* dimensions, bool output) {
  if (t.ndim == 0) invalid(text(name, " is absent; this call needs it. Describe it with its shape, strides and dtype"));
  if (t.ndim == ndim && !known_dtype(t.dtype))
    invalid(text(name, " has the dtype ", dtype_text(t), "; allowed: fp32 (1), fp16 (2), bf16 (3), fp64 (4)"));
  check_view(name, t, ndim, dimensions, output);
}

void check_rows(const char* name, const fattn_tensor& t, bool packed, bool output, bool paged) {
  const int last = packed && !paged ? 2 : 3;
  check_tensor(name, t, last + 1,
               paged    ? "(pages, page_size, heads, headdim) of a paged cache (block_table)"
               : packed ? "(total, heads, headdim) of packed sequences (cu_seqlens_q, cu_seqlens_k)"
                        : "(batch, seqlen, heads, headdim)",
               output);
  if (t.shape[last] > 1 && t.strides[last] != 1)
    invalid(text(name, " has the stride ", t.strides[last], " in its last dimension (headdim); it must be 1. Make that dimension contiguous"));
}

void check_shape(const char* name, const fattn_tensor& t, std::array<int64_t, 4> wanted, const char* because) {
  for (int i = 0; i < t.ndim; ++i)
    if (t.shape[i] != wanted[static_cast<size_t>(i)]) {
      fattn_tensor w = t;
      for (int j = 0; j < t.ndim; ++j) w.shape[j] = wanted[static_cast<size_t>(j)];
      invalid(text(name, " has the shape ", shape_text(t), "; expected ", shape_text(w), ", ", because));
    }
}

void check_same_dtype(const char* name, const fattn_tensor& t, int32_t dtype) {
  if (t.dtype != dtype)
    invalid(text(name, " is ", name_of(static_cast<DType>(t.dtype)), " but q is ", name_of(static_cast<DType>(dtype)),
                 "; all tensors of a call share one dtype. Cast one of them"));
}

void check_output_dtype(const char* name, const fattn_tensor& t, int32_t dtype) {
  const bool has_16_bits = dtype == FATTN_F16 || dtype == FATTN_BF16;
  if (has_16_bits && t.dtype == FATTN_F32) return;
  if (has_16_bits && t.dtype != dtype)
    invalid(
        text(name, " is ", name_of(static_cast<DType>(t.dtype)), " but q is ", name_of(static_cast<DType>(dtype)), "; allowed: q's dtype, or fp32"));
  check_same_dtype(name, t, dtype);
}

void check_same_device(const char* name, const fattn_tensor& t, const fattn_tensor& q) {
  if (t.device_type != q.device_type || t.device_index != q.device_index)
    invalid(text(name, " is on ", device_text(t), " but q is on ", device_text(q), "; all tensors of a call are on one device. Copy one of them"));
}

// A stride along a dimension of one element reaches nothing, but kernels may form addresses with it: there it becomes that of an aligned row.
Strides row_strides(const fattn_tensor& t) {
  const int last = t.ndim - 1;
  const auto stride = [&](int i) { return t.shape[i] > 1 ? t.strides[i] : (t.shape[last] + 7) / 8 * 8; };
  return {last == 3 ? stride(0) : 0, stride(last - 2), stride(last - 1)};
}

void check_dtype(const char* name, const fattn_tensor& t, int32_t wanted, const char* because) {
  if (t.dtype != wanted)
    invalid(text(name, " has the dtype ", dtype_text(t), "; it must be ", name_of(static_cast<DType>(wanted)), " (", wanted, ")", because));
}

}  // namespace fattn::core
