// How a warpgroup's rows of dk and dv leave: through the tile of the keys (values) in shared memory, which nobody reads any more, by TMA.
#pragma once

#include "kernels/ptx/async_proxy.h"
#include "kernels/ptx/barrier.h"
#include "kernels/ptx/dependent_launch.h"
#include "kernels/ptx/tensor_copy.h"
#include "kernels/v3/backward_again.h"
#include "kernels/v3/backward_fragments.h"

namespace fattn::v3 {

template <int kCount>
__device__ __forceinline__ bool all_finite(const float (&x)[kCount]) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum = fmaf(x[i], 0.0f, sum);  // 0 or NaN
  return ptx::vote_all(sum == 0);
}

// Rows [in_tile, in_tile + 64) of the CTA's tile. `barrier`: a named one of the warpgroup.
template <class Spec, class Tile, bool kIsDk, int kWidth>
__device__ __forceinline__ void store_gradient(const float (&x)[kWidth / 2], const BackwardCall& p, TilePlace tile, unsigned in_shared, int in_tile,
                                               int barrier) {
  const int row = in_tile + static_cast<int>(own_warp_row());
  write_gradient<typename Spec::Element, Tile>(x, gradient_factor<kPairOf<Spec>>(p.call, kIsDk), in_shared + static_cast<unsigned>(128 * row));
  if constexpr (Spec::Mask::kUneven) {
    if (!all_finite(x)) [[unlikely]] {
      ptx::wait_for_kernel_before();  // it wrote the row sums, which this thread has only seen through copies
      ptx::warp_sync();
      keys_again<Spec, Tile, kIsDk, kWidth>(p, tile, in_shared, row, static_cast<int>(own_lane()));
    }
  }
  if constexpr (kPairOf<Spec>.lengths) {
    ptx::warp_sync();
    clear_rows<Tile>(in_shared, max(row, tile.keys<true>().keys - tile.key()), row + 16, static_cast<int>(own_lane()), 32);
  }
  ptx::async_proxy_fence();
  ptx::bar_sync(barrier, 128);
  if (static_cast<int>(threadIdx.x) % 128 == 0 && tile.key() + in_tile < p.call.seqlen_k) {
    for (int column = 0; column < Tile::kColumns; ++column)
      ptx::tensor_store(kIsDk ? &p.dk : &p.dv, in_shared + static_cast<unsigned>(column * Tile::kColumnBytes + 128 * in_tile),
                        {64 * column, tile.key() + in_tile, tile.head_k(), tile.batch()});
    ptx::bulk_commit();
  }
}

}  // namespace fattn::v3
