#include "rows/checks.h"

#include <algorithm>
#include <cstdio>

#include "plan/plan.h"
#include "problem/overlap.h"
#include "shared/text.h"

namespace fattn::core::rows {

PartName::PartName(int part, const char* member) { std::snprintf(text_, sizeof text_, "parts[%d].%s", part, member); }

void check_numbers(const char* name, const fattn_tensor& t, int ndim, const char* dimensions, bool output) {
  check_tensor(name, t, ndim, dimensions, output);
  if (t.shape[ndim - 1] > 1 && t.strides[ndim - 1] != 1)
    invalid(text(name, " has the stride ", t.strides[ndim - 1], " in its last dimension; it must be 1. Make that dimension contiguous"));
}

void check_fits(const char* name, const fattn_tensor& t, const char* first_name, const fattn_tensor& first) {
  if ((t.dtype == FATTN_F64) != (first.dtype == FATTN_F64))
    invalid(text(name, " is ", name_of(static_cast<DType>(t.dtype)), " but ", first_name, " is ", name_of(static_cast<DType>(first.dtype)),
                 "; fp64 goes with fp64 alone, in all tensors. Cast one of them"));
}

void check_device(const char* name, const fattn_tensor& t, const char* first_name, const fattn_tensor& first) {
  const auto place = [](const fattn_tensor& x) {
    return x.device_type == FATTN_DEVICE_CPU ? std::string("the CPU") : text("CUDA device ", x.device_index);
  };
  if (t.device_type != first.device_type || t.device_index != first.device_index)
    invalid(
        text(name, " is on ", place(t), " but ", first_name, " is on ", place(first), "; all tensors of a call are on one device. Copy one of them"));
}

void check_shape_of(const char* name, const fattn_tensor& t, std::initializer_list<int64_t> wanted, const char* because) {
  std::array<int64_t, 4> shape{};
  std::copy(wanted.begin(), wanted.end(), shape.begin());
  check_shape(name, t, shape, because);
}

void check_memory(const char* name, const fattn_tensor& t) {
  if (span_bytes(extent_of(t)) == 0) return;
  if (!t.data) invalid(text(name, " is a null pointer, but its shape has elements; pass its memory"));
  const size_t element = size_of(static_cast<DType>(t.dtype));
  if (reinterpret_cast<uintptr_t>(t.data) % element != 0)
    invalid(text(name, " points to ", t.data, ", which is not aligned to its element size of ", element, " bytes"));
}

bool same_view(const fattn_tensor& a, const fattn_tensor& b) {
  if (a.data != b.data || a.dtype != b.dtype || a.ndim != b.ndim) return false;
  for (int i = 0; i < a.ndim; ++i)
    if (a.shape[i] != b.shape[i] || (a.shape[i] > 1 && a.strides[i] != b.strides[i])) return false;
  return true;
}

void check_apart(const char* output_name, const fattn_tensor& output, const char* name, const fattn_tensor& other, bool may_be_same) {
  if (!may_overlap(output.data, extent_of(output), other.data, extent_of(other)) || (may_be_same && same_view(output, other))) return;
  invalid(text(output_name, " overlaps ", name, " in memory; ",
               may_be_same ? "allowed: memory of its own, or the same pointer, strides and dtype" : "an output needs memory of its own"));
}

void check_positions(const char* name, int64_t index, int64_t first, int64_t rows, int64_t positions) {
  if (rows == 0 || (first >= 0 && rows <= positions && first <= positions - rows)) return;
  const std::string who = index >= 0 ? text(name, "[", index, "]") : std::string(name);
  invalid(text(who, " is ", first, ", for a sequence of ", rows, " rows; cos has ", positions, positions == 1 ? " row" : " rows",
               rows <= positions ? text(", so that allowed are 0 to ", positions - rows) : std::string(", fewer than the sequence"),
               ". Make cos and sin for more positions"));
}

void check_stream(const void* stream, Device device) {
  if (stream && device == Device::kCpu) invalid("stream is given, and the tensors are on the CPU, which has none; pass null");
}

Backend backend_for(int32_t asked, const fattn_tensor& first) {
  const auto dtype = static_cast<DType>(first.dtype);
  const Backend backend = choose_backend(static_cast<Backend>(asked), dtype, static_cast<Device>(first.device_type), first.device_index);
  if (dtype == DType::kF64 && backend != Backend::kReference)
    throw Error(ErrorCode::kUnsupported, text("backend ", name_of(backend),
                                              " computes fp32, fp16 and bf16; fp64 runs on backend reference only, in host "
                                              "memory"));
  return backend;
}

}  // namespace fattn::core::rows
