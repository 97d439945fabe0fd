// Host side of kernels/rows: merge, rotary embeddings and append on a GPU.
#pragma once

#include <array>
#include <cstdint>

#include "backend/cuda/kernel_kind.h"
#include "jit/jit.h"

namespace fattn::core::rows::cuda {

// 64 bytes without padding.
struct RowsKey {
  core::cuda::KernelKind kind = core::cuda::KernelKind::kMerge;
  int32_t arch = 0;
  int32_t unit = 4;  // elements that a thread takes at once: 4, where all lie at multiples of four, or 1
  std::array<int32_t, 13> reserved{};
};
static_assert(sizeof(RowsKey) == 64);
jit::Request rows_request(const RowsKey& key);

}  // namespace fattn::core::rows::cuda
