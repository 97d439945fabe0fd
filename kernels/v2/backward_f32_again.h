// Rows of gradients in fp32 by IEEE rules from global memory, by one warp: where the matrix products gave Inf or NaN. That is right, or a number was
// beyond what they can take, or an Inf met a weight of 0 or a part of a number. Seldom used, so small rather than fast.
#pragma once

#include "kernels/constants.h"
#include "kernels/pair.h"
#include "kernels/ptx/math.h"
#include "kernels/score.h"
#include "kernels/v2/global_row.h"
#include "kernels/v2/workspace.h"
#include "shared/lowest.h"
#include "shared/mask.h"

namespace fattn::v2 {

// The pairs of one query head. Spec: as in backward_f32.h.
template <class Spec>
struct HeadPairs {
  static constexpr int kHeaddim = Spec::kHeaddim, kHeaddimV = Spec::kHeaddimV;
  static constexpr PairFeatures kPair = kPairOf<Spec>;

  const AttentionParams& p;
  const HeadRows q, k, v, dout;
  const float *lse, *row_sum;
  const long long lse_stride;
  const float scale;
  const Terms<kPair, f16> terms;
  const Dropout<kPair> dropout;

  __device__ __forceinline__ HeadPairs(const AttentionParams& params, int batch, int head, int seqlen_k)
      : p(params),
        q(p.q, p.q_strides, batch, head),
        k(p.k, p.k_strides, batch, head / p.group),
        v(p.v, p.v_strides, batch, head / p.group),
        dout(p.dout, p.dout_strides, batch, head),
        lse(p.lse + batch * p.lse_strides.batch + head * p.lse_strides.head),
        row_sum(p.row_sum + workspace_rows<kPair>(p, static_cast<long long>(batch) * p.nheads + head, head)),
        lse_stride(p.lse_strides.row),
        scale(p.softmax_scale),
        terms(p, batch, head, seqlen_k),
        dropout(p, batch, head) {}

  __device__ __forceinline__ bool empty(int row) const { return lse[row * lse_stride] < kLowestLse; }
  // Of a pair that the mask does not hide.
  __device__ __forceinline__ bool sees(int row, int key) const { return !kPair.hides() || terms.sees(row, key); }

  // P of a pair whose product of q and k is `score`; `slope`: what softcap makes of a difference of scores.
  __device__ __forceinline__ float weight_of(float score, int row, int key, float& slope) const {
    slope = 1;
    if constexpr (Spec::kCapped || kPair.terms()) {
      const float s = capped_closely<Spec>(p, score), scale_log2 = Spec::kCapped ? p.softmax_scale_log2 : scale * kLog2e;
      if constexpr (Spec::kCapped) slope = fmaf(-s, s, 1.0f);
      return ptx::ex2(fmaf(s, scale_log2, fmaf(-lse[row * lse_stride], kLog2e, terms(row, key))));
    } else {
      return ptx::ex2(fmaf(score, scale, -lse[row * lse_stride]) * kLog2e);
    }
  }
  // dS of a pair whose product of dO and v is `gradient`.
  __device__ __forceinline__ float gradient_of(float weight, float slope, float gradient, int row, int key) const {
    if constexpr (kPair.dropout) gradient = dropout.keeps(row, key) ? gradient * pairs_of(p).dropout_scale : 0.0f;
    return weight * (gradient - row_sum[row]) * slope;
  }

  // All lanes of a warp together.
  __device__ __forceinline__ float weight(int row, int key, int lane) const {
    float slope;
    const float weight = weight_of(warp_dot(q.row(row), 1.0f, k.row(key), kHeaddim, lane), row, key, slope);
    if constexpr (kPair.dropout) return dropout.keeps(row, key) ? weight * pairs_of(p).dropout_scale : 0.0f;
    return weight;
  }
  __device__ __forceinline__ float gradient(int row, int key, int lane) const {
    float slope;
    const float weight = weight_of(warp_dot(q.row(row), 1.0f, k.row(key), kHeaddim, lane), row, key, slope);
    return gradient_of(weight, slope, warp_dot(dout.row(row), 1.0f, v.row(key), kHeaddimV, lane), row, key);
  }
  // One lane by itself; without softcap.
  __device__ __forceinline__ float gradient_alone(int row, int key) const {
    if (empty(row)) return 0;
    float slope;
    const float weight = weight_of(dot_alone(q.row(row), k.row(key), kHeaddim), row, key, slope);
    return gradient_of(weight, 1.0f, dot_alone(dout.row(row), v.row(key), kHeaddimV), row, key);
  }
};

// The lane's column of dq, but for softmax_scale.
template <class Spec>
__device__ __forceinline__ float dq_again(const AttentionParams& p, const core::Mask32& mask, int batch, int head, int row, int column, int lane) {
  const HeadPairs<Spec> pairs(p, batch, head, mask.seqlen_k);
  const int end = pairs.empty(row) ? 0 : mask.visible_end(row);
  float sum = 0;
#pragma unroll 1
  for (int key = Spec::kWindow ? mask.visible_begin(row) : 0; key < end; ++key) {
    if (!pairs.sees(row, key)) continue;
    const float ds = pairs.gradient(row, key, lane);
    if (column < Spec::kHeaddim) sum = fmaf(ds, pairs.k.row(key)[column], sum);
  }
  return sum;
}

// A row of dk (kIsDk) or dv, written to `to`.
template <class Spec, bool kIsDk>
__device__ __forceinline__ void key_row_again(const AttentionParams& p, const core::Mask32& mask, int batch, int head_k, int key, float* to,
                                              int lane) {
  constexpr int kColumns = kIsDk ? Spec::kHeaddim : Spec::kHeaddimV, kParts = (kColumns + 31) / 32;
  float sum[kParts] = {};
  int end = Spec::kWindow ? mask.row_end(key) : p.seqlen_q;
  if (kPairOf<Spec>.lengths && key >= mask.seqlen_k) end = 0;  // behind the entry's last key: no query sees it
#pragma unroll 1
  for (int head = head_k * p.group; head < (head_k + 1) * p.group; ++head) {
    const HeadPairs<Spec> pairs(p, batch, head, mask.seqlen_k);
#pragma unroll 1
    for (int row = mask.first_row(key); row < end; ++row) {
      if (pairs.empty(row) || !pairs.sees(row, key)) continue;
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
