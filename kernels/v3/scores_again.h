// Scores of one warp's 16 rows by mma from shared memory, in the layout of wgmma: the way back when a block's weights left their window, after the
// scores were overwritten. A warp may go it alone. Seldom used, so small rather than fast.
#pragma once

#include "kernels/ptx/mma.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/v3/forward_shape.h"

namespace fattn::v3 {

// `q_rows`: the warp's first row in the tile of queries; `k_tile`: the block of keys.
template <class Spec>
__device__ __forceinline__ void scores_again(float (&s)[Spec::kBlockN / 2], unsigned q_rows, unsigned k_tile, int lane) {
  using Shape = ForwardShape<Spec>;
#pragma unroll
  for (int i = 0; i < Spec::kBlockN / 2; ++i) s[i] = 0;
  const unsigned row = static_cast<unsigned>(lane) / 4, in_row = row * 128 + static_cast<unsigned>(lane) % 4 * 4;
#pragma unroll 1
  for (int step = 0; step < Shape::kDepth; ++step) {
    const unsigned unit = static_cast<unsigned>(step) % 4 * 2;  // of 16 bytes, in a row of 128
    const unsigned left = (unit ^ row) * 16, right = ((unit + 1) ^ row) * 16;
    const unsigned q = q_rows + step / 4 * Shape::TileQ::kColumnBytes + in_row, k = k_tile + step / 4 * Shape::TileK::kColumnBytes + in_row;
    const unsigned a[4] = {ptx::ld_shared_4(q + left), ptx::ld_shared_4(q + 1024 + left), ptx::ld_shared_4(q + right),
                           ptx::ld_shared_4(q + 1024 + right)};
#pragma unroll
    for (int n = 0; n < Spec::kBlockN / 8; ++n) {
      const unsigned b0 = ptx::ld_shared_4(k + n * 1024 + left), b1 = ptx::ld_shared_4(k + n * 1024 + right);
      float d[4] = {s[4 * n], s[4 * n + 1], s[4 * n + 2], s[4 * n + 3]};
      if constexpr (is_same<typename Spec::Element, bf16>)
        ptx::mma_m16n8k16_bf16(d, a, b0, b1);
      else
        ptx::mma_m16n8k16_f16(d, a, b0, b1);
#pragma unroll
      for (int e = 0; e < 4; ++e) s[4 * n + e] = d[e];
    }
  }
}

}  // namespace fattn::v3
