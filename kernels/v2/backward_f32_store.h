// dK and dV leave the backward pass in fp32 (kernels/v2/backward_f32.h); rows that are no numbers are computed again.
#pragma once

#include "kernels/mask.h"
#include "kernels/pair.h"
#include "kernels/ptx/reduce.h"
#include "kernels/v2/backward_f32_again.h"
#include "kernels/v2/backward_f32_cta.h"
#include "kernels/v2/rows_again.h"

namespace fattn::v2 {

// Writes this warp's rows of dV or dK, this part of their columns; what is computed again is a row with all columns, by whichever part needs it.
template <class Spec>
template <bool kIsDk>
__device__ void BackwardF32<Spec>::store_gradient(const float (&d)[kKeyTiles][kSumTiles][4], float scale) const {
  const auto& p = found_params();
  const void* const tensor = kIsDk ? p.dk : p.dv;
  const TensorStrides& strides = kIsDk ? p.dk_strides : p.dv_strides;
  constexpr int kAll = kIsDk ? Spec::kHeaddim : Spec::kHeaddimV, kOwn = kIsDk ? kColumns : kColumnsV;
  const int lane = this_lane(), key_group = this_group();
  RowsAgain again;
#pragma unroll
  for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int first = first_key + key_group * kKeys + 16 * i + 8 * half, key = first + lane / 4;
      float* const row = const_cast<float*>(at(tensor, strides, batch, head_k, key));
      bool good = true;
#pragma unroll
      for (int n = 0; n < kOwn / 8; ++n) {
        const float x[2] = {d[i][n][2 * half] * scale, d[i][n][2 * half + 1] * scale};
        good = good && is_finite(x[0]) && is_finite(x[1]);
        const int column = part * kOwn + 8 * n + lane % 4 * 2;
        if (key >= p.seqlen_k) continue;
        if constexpr (Spec::kAligned && kAll % 2 == 0) {
          if (column < kAll) *reinterpret_cast<float2*>(row + column) = float2{x[0], x[1]};
        } else {
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (column + e < kAll) row[column + e] = x[e];
        }
      }
      again.note(2 * i + half, ptx::ballot(!good && key < p.seqlen_k));
    }
  if (kPair.lengths && given_length(p, batch) < 0) return;                            // NaN it shall be
  constexpr int kRows = kAll > 128 && kPair.alibi && kPair.dropout ? 4 : kRowsAgain;  // for which there are registers
  again.for_each<kRows>([&](int row, unsigned wanted) {
    key_rows_again<Spec, kIsDk, kRows>(p, mask(), batch, head_k, first_key + key_group * kKeys + row, wanted, lane);
  });
}

}  // namespace fattn::v2
