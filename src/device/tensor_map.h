// Tensor maps for the kernels that copy with TMA: which views they can describe, and the driver's encoding of one. Kernel side:
// kernels/ptx/tensor_copy.h.
#pragma once

#include <cstdint>
#include <string>

#include "device/cuda_device.h"
#include "device_abi/tensor_map.h"
#include "fattn/types.hpp"

namespace fattn::core {

// A view (batch, rows, heads, columns), of which boxes of 128 bytes by `box_rows` rows are copied, swizzled in shared memory by 128 bytes. The kernel
// names a box by (column, row, head, batch). Strides are in elements; columns are contiguous.
struct TiledTensor {
  DType dtype = DType::kBF16;
  int64_t batch = 0, rows = 0, heads = 0, columns = 0;
  int64_t batch_stride = 0, row_stride = 0, head_stride = 0;
  int box_rows = 0;  // 1 to 256
};

// Why TMA cannot describe the view; empty: it can. `name` is the tensor's.
std::string tensor_map_refusal(const TiledTensor& tensor, const char* name);
// Whether a tensor may begin here.
inline bool tensor_map_takes(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

// For views that are not refused. Allocates nothing. Throws what CudaDevice::check() does. Not a function that returns the map: g++ 12 does not align
// the temporary, and the driver refuses it.
void encode_tensor_map(TensorMap& map, CudaDevice& device, const TiledTensor& tensor, const void* address);

}  // namespace fattn::core
