// A tensor map: what the tensor memory accelerator (TMA, sm_90 and later) knows of a tensor, encoded by the driver. Include-free, because the host
// makes it (device/tensor_map.h) and a kernel takes it as a __grid_constant__ parameter.
#pragma once

namespace fattn {

struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

}  // namespace fattn
