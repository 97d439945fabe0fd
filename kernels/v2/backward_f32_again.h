// Rows of gradients in fp32 by IEEE rules from global memory, by one warp: where the matrix products gave Inf or NaN. That is right, or a number was
// beyond what they can take, or an Inf met a weight of 0 or a part of a number. Seldom used, so small rather than fast.
#pragma once

#include "kernels/constants.h"
#include "kernels/ptx/math.h"
#include "kernels/v2/global_row.h"
#include "shared/mask.h"

namespace fattn::v2 {

// The pairs of one query head.
template <int kHeaddim, int kHeaddimV>
struct HeadPairs {
  const HeadRows q, k, v, dout;
  const float *lse, *row_sum;
  const long long lse_stride;
  const float scale;

  __device__ __forceinline__ HeadPairs(const AttentionParams& p, int batch, int head)
      : q(p.q, p.q_strides, batch, head),
        k(p.k, p.k_strides, batch, head / p.group),
        v(p.v, p.v_strides, batch, head / p.group),
        dout(p.dout, p.dout_strides, batch, head),
        lse(p.lse + batch * p.lse_strides.batch + head * p.lse_strides.head),
        row_sum(p.row_sum + (static_cast<long long>(batch) * p.nheads + head) * p.seqlen_q),
        lse_stride(p.lse_strides.row),
        scale(p.softmax_scale) {}

  __device__ __forceinline__ bool empty(int row) const { return lse[row * lse_stride] == -kInfinity; }
  __device__ __forceinline__ float weight(int row, int key, int lane) const {
    return ptx::ex2(fmaf(warp_dot(q.row(row), 1.0f, k.row(key), kHeaddim, lane), scale, -lse[row * lse_stride]) * kLog2e);
  }
  // dS.
  __device__ __forceinline__ float gradient(int row, int key, int lane) const {
    return weight(row, key, lane) * (warp_dot(dout.row(row), 1.0f, v.row(key), kHeaddimV, lane) - row_sum[row]);
  }
};

// The lane's column of dq, but for softmax_scale.
template <int kHeaddim, int kHeaddimV>
__device__ __forceinline__ float dq_again(const AttentionParams& p, const core::Mask32& mask, int batch, int head, int row, int column, int lane) {
  const HeadPairs<kHeaddim, kHeaddimV> pairs(p, batch, head);
  const int end = pairs.empty(row) ? 0 : mask.visible_end(row);
  float sum = 0;
#pragma unroll 1
  for (int key = 0; key < end; ++key) {
    const float ds = pairs.gradient(row, key, lane);
    if (column < kHeaddim) sum = fmaf(ds, pairs.k.row(key)[column], sum);
  }
  return sum;
}

// A row of dk (kIsDk) or dv, written to `to`.
template <int kHeaddim, int kHeaddimV, bool kIsDk>
__device__ __forceinline__ void key_row_again(const AttentionParams& p, const core::Mask32& mask, int batch, int head_k, int key, float* to,
                                              int lane) {
  constexpr int kColumns = kIsDk ? kHeaddim : kHeaddimV, kParts = (kColumns + 31) / 32;
  float sum[kParts] = {};
#pragma unroll 1
  for (int head = head_k * p.group; head < (head_k + 1) * p.group; ++head) {
    const HeadPairs<kHeaddim, kHeaddimV> pairs(p, batch, head);
#pragma unroll 1
    for (int row = mask.first_row(key); row < p.seqlen_q; ++row) {
      if (pairs.empty(row)) continue;
      const float factor = kIsDk ? pairs.gradient(row, key, lane) : pairs.weight(row, key, lane);
      const float* with = kIsDk ? pairs.q.row(row) : pairs.dout.row(row);
#pragma unroll
      for (int i = 0; i < kParts; ++i)
        if (lane + 32 * i < kColumns) sum[i] = fmaf(factor, with[lane + 32 * i], sum[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kParts; ++i)
    if (lane + 32 * i < kColumns) to[lane + 32 * i] = kIsDk ? sum[i] * p.softmax_scale : sum[i];
}

}  // namespace fattn::v2
