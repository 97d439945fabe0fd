#include "device/tensor_map.h"

#include "shared/text.h"

namespace fattn::core {
namespace {

constexpr int kSwizzleBytes = 128;
constexpr int64_t kMostStrideBytes = int64_t{1} << 40, kMostSize = int64_t{1} << 32;  // CUDA driver API, cuTensorMapEncodeTiled

// Values of that function's enumerations.
constexpr int kFloat16 = 6, kFloat32 = 7, kBfloat16 = 9;
constexpr int kNotInterleaved = 0, kSwizzle128 = 3, kPromoteTo256Bytes = 3, kFillWithZeros = 0;

int driver_dtype(DType dtype) { return dtype == DType::kBF16 ? kBfloat16 : dtype == DType::kF16 ? kFloat16 : kFloat32; }

}  // namespace

std::string tensor_map_refusal(const TiledTensor& t, const char* name) {
  const int64_t element = static_cast<int64_t>(size_of(t.dtype));
  const auto wrong = [&](const char* dimension, int64_t size, int64_t stride) -> std::string {
    if (size < 1 || size >= kMostSize) return text(name, " has ", dimension, " of size ", size, "; TMA takes 1 to 2^32 - 1");
    if (size == 1) return {};  // a stride that is never used
    if (stride * element % 16 != 0 || stride <= 0 || stride >= kMostStrideBytes / element)
      return text(name, " has a stride of ", stride, " elements from ", dimension, " to the next; TMA takes multiples of ", 16 / element,
                  " below 2^40 bytes");
    return {};
  };
  std::string why = wrong("one column", t.columns, 16 / element);
  if (why.empty()) why = wrong("one row", t.rows, t.row_stride);
  if (why.empty()) why = wrong("one head", t.heads, t.head_stride);
  if (why.empty()) why = wrong("one batch", t.batch, t.batch_stride);
  return why;
}

void encode_tensor_map(TensorMap& map, CudaDevice& device, const TiledTensor& t, const void* address) {
  const CudaDriver& driver = cuda_driver();
  const auto element = static_cast<uint64_t>(size_of(t.dtype));
  const auto bytes = [&](int64_t size, int64_t stride) { return size == 1 ? uint64_t{16} : static_cast<uint64_t>(stride) * element; };
  const uint64_t sizes[4] = {static_cast<uint64_t>(t.columns), static_cast<uint64_t>(t.rows), static_cast<uint64_t>(t.heads),
                             static_cast<uint64_t>(t.batch)};
  const uint64_t strides[3] = {bytes(t.rows, t.row_stride), bytes(t.heads, t.head_stride), bytes(t.batch, t.batch_stride)};
  const uint32_t box[4] = {static_cast<uint32_t>(kSwizzleBytes / element), static_cast<uint32_t>(t.box_rows), 1, 1};
  const uint32_t every[4] = {1, 1, 1, 1};
  device.check(driver.tensorMapEncodeTiled(&map, driver_dtype(t.dtype), 4, const_cast<void*>(address), sizes, strides, box, every, kNotInterleaved,
                                           kSwizzle128, kPromoteTo256Bytes, kFillWithZeros),
               "describing a tensor to TMA");
}

}  // namespace fattn::core
