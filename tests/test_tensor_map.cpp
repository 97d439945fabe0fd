// Which views TMA can describe, and what the driver is asked to encode, with the stub of libcuda.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "device/tensor_map.h"
#include "stub/cuda_stub.h"

namespace fattn::core {
namespace {

const bool stub_is_set = [] {
  setenv("FATTN_CUDA_DRIVER", FATTN_STUB_CUDA_PATH, 1);
  return true;
}();

TiledTensor contiguous() { return {DType::kBF16, 2, 100, 4, 64, 100 * 4 * 64, 4 * 64, 64, 128}; }

void expect_refused(const TiledTensor& tensor, const std::string& part) {
  const std::string why = tensor_map_refusal(tensor, "k");
  EXPECT_NE(why.find(part), std::string::npos) << why;
  EXPECT_EQ(why.find("k has "), 0u) << why;
}

TEST(TensorMapSmall, RefusesWhatTheDriverWould) {
  EXPECT_EQ(tensor_map_refusal(contiguous(), "k"), "");
  TiledTensor t = contiguous();
  t.row_stride = 4 * 64 + 4;
  expect_refused(t, "a stride of 260 elements from one row");
  t.rows = 1;  // a stride that is never used
  EXPECT_EQ(tensor_map_refusal(t, "k"), "");
  t = contiguous();
  t.head_stride = 0;  // an expanded view
  expect_refused(t, "a stride of 0 elements from one head");
  t = contiguous();
  t.batch_stride = int64_t{1} << 39;
  expect_refused(t, "2^40 bytes");
  t = contiguous();
  t.rows = 0;
  expect_refused(t, "one row of size 0");
  t = contiguous();
  t.dtype = DType::kF32;
  t.row_stride = 4 * 64 + 4;  // 16 bytes more
  EXPECT_EQ(tensor_map_refusal(t, "k"), "");
}

TEST(TensorMapSmall, ColumnsNeedNotFillTheBox) {
  TiledTensor t = contiguous();
  for (const int64_t columns : {1, 20, 63, 65, 256}) {
    t.columns = columns;
    EXPECT_EQ(tensor_map_refusal(t, "k"), "") << columns;
  }
}

TEST(TensorMapSmall, AddressesAreMultiplesOf16) {
  EXPECT_TRUE(tensor_map_takes(reinterpret_cast<const void*>(uintptr_t{4096 + 16})));
  EXPECT_FALSE(tensor_map_takes(reinterpret_cast<const void*>(uintptr_t{4096 + 8})));
}

// The stub checks alignment, sizes and strides as the driver does, and puts the address into the map.
TEST(TensorMapSmall, TheDriverTakesWhatIsNotRefused) {
  CudaDevice& device = cuda_device(0);
  TiledTensor t = contiguous();
  const auto encode = [&](uintptr_t address) {
    TensorMap map;
    encode_tensor_map(map, device, t, reinterpret_cast<const void*>(address));
    return map.opaque[0];
  };
  EXPECT_EQ(encode(4096), 4096u);
  t.batch = 1, t.batch_stride = 7;
  EXPECT_EQ(encode(4096), 4096u);
  EXPECT_THROW(encode(4096 + 8), Error);
  t.row_stride = 4 * 64 + 4;
  EXPECT_THROW(encode(4096), Error);
}

}  // namespace
}  // namespace fattn::core
