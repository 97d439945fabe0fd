// Backward in fp32, last kernel: dq = softmax_scale * dq_accum, with the strides of dq.
//
// A warp takes 16 queries x 32 columns. A row without a gradient (device_abi/lowest.h) gets 0 whatever was added up for it: 0 * -inf, where k holds
// -inf, is NaN. Other rows that are not finite are computed again. Spec: kHeaddim, kHeaddimV, kCausal, kWindow, kCapped, kAligned, kTile, kPair, as
// in backward_f32.h.
#pragma once

#include "device_abi/attention_params.h"
#include "device_abi/backward_f32_layout.h"
#include "device_abi/backward_layout.h"
#include "device_abi/lowest.h"
#include "device_abi/mask.h"
#include "kernels/constants.h"
#include "kernels/mask.h"
#include "kernels/pair.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/ptx/warp.h"
#include "kernels/v2/backward_f32_again.h"
#include "kernels/v2/dq_accum.h"
#include "kernels/v2/workspace.h"

namespace fattn::v2 {

template <class Spec>
__device__ __forceinline__ void backward_f32_finish(const AttentionParams& call) {
  constexpr PairFeatures kPair = kPairOf<Spec>;
  constexpr int kWidth = Spec::kTile.width, kHeaddim = Spec::kHeaddim, kColumnGroups = kWidth / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const long long row_blocks = dq_accum_blocks(call.seqlen_q);
  const long long unit = static_cast<long long>(blockIdx.x) * (kFinishThreads / 32) + ptx::warp_id();
  const int first_column = static_cast<int>(unit % kColumnGroups) * 32;
  const long long block = unit / kColumnGroups, batch_head = block / row_blocks;
  if (batch_head >= static_cast<long long>(call.batch) * call.nheads) return;
  const int first_row = static_cast<int>(block % row_blocks) * kDqAccumRows;
  const int batch = static_cast<int>(batch_head / call.nheads), head = static_cast<int>(batch_head % call.nheads);
  const auto& p = backward_params<kPair, kWidth, kDqAccumRows, float>(call, batch);
  if (kPair.packed && first_row >= p.seqlen_q) return;

  const float* accum = p.dq_accum + workspace_accum<kPair, kWidth>(p, batch_head, head, dq_accum_head(p.seqlen_q, kWidth)) +
                       static_cast<long long>(first_row) * kWidth + first_column * kDqAccumRows;
  float4 x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = read_dq(accum + 128 * i, lane);
  const bool wrong_length = kPair.lengths && given_length(p, batch) < 0;  // dq_accum is NaN then, and dq shall be
  float* const dq = static_cast<float*>(p.dq) + batch * p.dq_strides.batch + head * p.dq_strides.head;
  RowsAgain again;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + lane / 4 + 8 * half;
    const bool exists = row < p.seqlen_q;
    const bool empty =
        exists && !wrong_length && p.lse[batch * p.lse_strides.batch + head * p.lse_strides.head + row * p.lse_strides.row] < kLowestLse;
    bool good = true;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float pair[2] = {(half == 0 ? x[i].x : x[i].z) * p.softmax_scale, (half == 0 ? x[i].y : x[i].w) * p.softmax_scale};
      good = good && is_finite(pair[0]) && is_finite(pair[1]);
      const int column = first_column + 8 * i + lane % 4 * 2;
      float* const to = dq + row * p.dq_strides.row + column;
      if (!exists) continue;
      if constexpr (Spec::kAligned && kHeaddim % 2 == 0) {
        if (column < kHeaddim) *reinterpret_cast<float2*>(to) = empty ? float2{0, 0} : float2{pair[0], pair[1]};
      } else {
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (column + e < kHeaddim) to[e] = empty ? 0.0f : pair[e];
      }
    }
    again.note(half, ptx::ballot(!good && exists && !empty && !wrong_length));
  }
  const core::Mask32 mask = [&] {
    const int seqlen_k = keys_of<kPair>(p, batch);
    if constexpr (Spec::kWindow)
      return window_mask_of<kPair>(p, seqlen_k);
    else
      return core::Mask32{p.seqlen_q, seqlen_k, Spec::kCausal};
  }();
  constexpr int kRows = 2;  // at a time: more would take the registers that other warps need
  again.for_each<kRows>(
      [&](int row, unsigned wanted) { dq_rows_again<Spec, kRows>(p, mask, batch, head, first_row + row, wanted, first_column, lane); });
}

}  // namespace fattn::v2
