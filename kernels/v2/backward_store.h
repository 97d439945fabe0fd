// dK and dV leave the backward pass (kernels/v2/backward.h): through the shared memory of K and V, or in fp32 from registers.
#pragma once

#include "kernels/ptx/convert.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/v2/backward_cta.h"
#include "kernels/v2/store_pair.h"
#include "kernels/v2/swizzled_tile.h"

namespace fattn::v2 {

template <class Spec>
template <int kInner, int kSpan>
__device__ void Backward<Spec>::store_gradient(unsigned tile, const float (&d)[kKeyTiles][kSumTiles][4], float scale, int first_column) const {
#pragma unroll
  for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
    for (int j = 0; j < kSpan / 8; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = key_group * kKeys + 16 * i + 8 * half + lane / 4;
        ptx::st_shared_4(tile + SwizzledTile<kInner>::offset(row, first_column / 8 + j) + lane % 4 * 4,
                         ptx::pack2<Element>(d[i][j][2 * half] * scale, d[i][j][2 * half + 1] * scale));
      }
}

// From registers to `to`.
template <class Spec>
template <int kHeaddim, int kSpan>
__device__ void Backward<Spec>::store_fp32_gradient(void* to, const TensorStrides& s, const float (&d)[kKeyTiles][kSumTiles][4], float scale,
                                                    int first_column) const {
  float* const first = static_cast<float*>(to) + batch * s.batch + head_k * s.head + first_key * s.row;
#pragma unroll
  for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = key_group * kKeys + 16 * i + 8 * half + lane / 4;
#pragma unroll
      for (int j = 0; j < kSpan / 8; ++j)
        store_pair<kHeaddim, Spec::kAligned>(first + row * s.row, first_column + 8 * j + lane % 4 * 2, d[i][j][2 * half] * scale,
                                             d[i][j][2 * half + 1] * scale, first_key + row < p.seqlen_k);
    }
}

}  // namespace fattn::v2
