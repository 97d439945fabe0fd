// Rows of gradients in fp32 by IEEE rules from global memory, by one warp: where the matrix products gave Inf or NaN. That is right, or a number was
// beyond what they can take, or an Inf met a weight of 0 or a part of a number.
#pragma once

#include "device_abi/lowest.h"
#include "device_abi/mask.h"
#include "kernels/constants.h"
#include "kernels/pair.h"
#include "kernels/ptx/math.h"
#include "kernels/ptx/reduce_warp.h"
#include "kernels/score.h"
#include "kernels/v2/rows_again.h"
#include "kernels/v2/workspace.h"

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

  // Whether the gradients of row `row` are not finite: lse is NaN, or the row's sum of o * dout is not finite.
  __device__ __forceinline__ bool spoilt(int row, bool weight_alone) const {
    const float of = lse[row * lse_stride];
    return of != of || (!weight_alone && !empty(row) && !is_finite(row_sum[row]));
  }

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

  // P of a pair as it enters dv, and dS, from the products of q and k, and of dout and v.
  __device__ __forceinline__ float kept_weight(float score, int row, int key) const {
    float slope;
    const float weight = weight_of(score, row, key, slope);
    if constexpr (kPair.dropout) return dropout.keeps(row, key) ? weight * pairs_of(p).dropout_scale : 0.0f;
    return weight;
  }
  __device__ __forceinline__ float gradient(float score, float product, int row, int key) const {
    float slope;
    const float weight = weight_of(score, row, key, slope);
    return gradient_of(weight, slope, product, row, key);
  }
  // One lane by itself; without softcap.
  __device__ __forceinline__ float gradient_alone(int row, int key) const {
    if (empty(row)) return 0;
    float slope;
    const float weight = weight_of(dot_alone(q.row(row), k.row(key), kHeaddim), row, key, slope);
    return gradient_of(weight, 1.0f, dot_alone(dout.row(row), v.row(key), kHeaddimV), row, key);
  }
};

// Rows of dq: of the kRows from `first` on those with a bit in `wanted`, 32 columns from `first_column`.
template <class Spec, int kRows>
__device__ __forceinline__ void dq_rows_again(const AttentionParams& p, const core::Mask32& mask, int batch, int head, int first, unsigned wanted,
                                              int first_column, int lane) {
  const HeadPairs<Spec> pairs(p, batch, head, mask.seqlen_k);
  const int last = p.seqlen_q - 1, end = mask.visible_end(min(first + kRows - 1, last));
  float sum[kRows][1];
#pragma unroll
  for (int i = 0; i < kRows; ++i) sum[i][0] = pairs.spoilt(min(first + i, last), false) ? kNan : 0.0f;
#pragma unroll 1
  for (int block = Spec::kWindow ? mask.visible_begin(first) : 0; block < end; block += 32) {
    if (!some_may_change<Spec::kHeaddim>(sum, wanted, first_column, lane)) break;
    const int key = block + lane, own = min(key, end - 1);
    float s[kRows], product[kRows];
    products_again<Spec::kAligned>(s, pairs.k.row(own), pairs.q, first, last, Spec::kHeaddim);
    products_again<Spec::kAligned>(product, pairs.v.row(own), pairs.dout, first, last, Spec::kHeaddimV);
    unsigned taken = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = min(first + i, last);
      bool seen = key < mask.visible_end(row) && !pairs.empty(row);
      if constexpr (Spec::kWindow) seen = seen && key >= mask.visible_begin(row);
      seen = seen && pairs.sees(row, key);
      s[i] = pairs.gradient(s[i], product[i], row, own);
      taken |= seen ? 1u << i : 0u;
    }
    add_rows_again<Spec::kHeaddim>(sum, s, taken, pairs.k, block, min(32, end - block), first_column, lane);
  }
  float* const dq = static_cast<float*>(p.dq) + batch * p.dq_strides.batch + head * p.dq_strides.head + first_column + lane;
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    if ((wanted >> i & 1) != 0 && first_column + lane < Spec::kHeaddim) dq[(first + i) * p.dq_strides.row] = sum[i][0] * p.softmax_scale;
}

// Which of the keys from `first` on, to `last_seen`, some row sees whose gradients are not finite: then theirs are not.
// It ends when all in `wanted` are among them.
template <class Spec, bool kIsDk>
__device__ __forceinline__ unsigned keys_of_spoilt_rows(const AttentionParams& p, const core::Mask32& mask, int batch, int head_k, int first,
                                                        int last_seen, unsigned wanted, int lane) {
  const int end = Spec::kWindow ? mask.row_end(last_seen) : p.seqlen_q;
  unsigned nan = 0;
#pragma unroll 1
  for (int head = head_k * p.group; head < (head_k + 1) * p.group; ++head) {
    const HeadPairs<Spec> pairs(p, batch, head, mask.seqlen_k);
#pragma unroll 1
    for (int block = mask.first_row(first); block < end; block += 32) {
      const int row = block + lane;
      unsigned of_row = 0;
      if (row < end && pairs.spoilt(row, !kIsDk)) {
#pragma unroll 1
        for (int key = first; key <= last_seen; ++key) {
          bool seen = row >= mask.first_row(key) && pairs.sees(row, key);
          if constexpr (Spec::kWindow) seen = seen && row < mask.row_end(key);
          if constexpr (!kIsDk && HeadPairs<Spec>::kPair.dropout) seen = seen && pairs.dropout.keeps(row, key);
          of_row |= seen ? 1u << (key - first) : 0u;
        }
      }
      nan |= ptx::warp_or(of_row);
      if ((wanted & ~nan) == 0) return nan;
    }
  }
  return nan;
}

// Rows of dk (kIsDk) or dv, of the kRows from `first` on, with all their columns.
template <class Spec, bool kIsDk, int kRows>
__device__ __forceinline__ void key_rows_again(const AttentionParams& p, const core::Mask32& mask, int batch, int head_k, int first, unsigned wanted,
                                               int lane) {
  constexpr int kColumns = kIsDk ? Spec::kHeaddim : Spec::kHeaddimV, kParts = (kColumns + 31) / 32;
  const int last = p.seqlen_k - 1, last_seen = min(first + kRows, kPairOf<Spec>.lengths ? mask.seqlen_k : p.seqlen_k) - 1;
  const unsigned nan = last_seen >= first ? keys_of_spoilt_rows<Spec, kIsDk>(p, mask, batch, head_k, first, last_seen, wanted, lane) : 0;
  float sum[kRows][kParts];
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int part = 0; part < kParts; ++part) sum[i][part] = (nan >> i & 1) != 0 ? kNan : 0.0f;
  bool open = last_seen >= first && (wanted & ~nan) != 0;  // keys behind the entry's last one are seen by no query
#pragma unroll 1
  for (int head = head_k * p.group; open && head < (head_k + 1) * p.group; ++head) {
    const HeadPairs<Spec> pairs(p, batch, head, mask.seqlen_k);
    const int end = Spec::kWindow ? mask.row_end(last_seen) : p.seqlen_q;
#pragma unroll 1
    for (int block = mask.first_row(first); open && block < end; block += 32) {
      const int row = min(block + lane, end - 1);
      float s[kRows];
      [[maybe_unused]] float product[kRows];
      products_again<Spec::kAligned>(s, pairs.q.row(row), pairs.k, first, last, Spec::kHeaddim);
      if constexpr (kIsDk) products_again<Spec::kAligned>(product, pairs.dout.row(row), pairs.v, first, last, Spec::kHeaddimV);
      const bool exists = block + lane < end && !pairs.empty(row);
      unsigned taken = 0;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int key = min(first + i, last_seen);
        bool seen = exists && first + i <= last_seen && row >= mask.first_row(key);
        if constexpr (Spec::kWindow) seen = seen && row < mask.row_end(key);
        seen = seen && pairs.sees(row, key);
        s[i] = kIsDk ? pairs.gradient(s[i], product[i], row, key) : pairs.kept_weight(s[i], row, key);
        taken |= seen ? 1u << i : 0u;
      }
      add_rows_again<kColumns>(sum, s, taken, kIsDk ? pairs.q : pairs.dout, block, min(32, end - block), 0, lane);
      open = some_may_change<kColumns>(sum, wanted, 0, lane);
    }
  }
  const TensorStrides& strides = kIsDk ? p.dk_strides : p.dv_strides;
  float* const to = static_cast<float*>(kIsDk ? p.dk : p.dv) + batch * strides.batch + head_k * strides.head + lane;
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      if ((wanted >> i & 1) != 0 && lane + 32 * part < kColumns)
        to[(first + i) * strides.row + 32 * part] = kIsDk ? sum[i][part] * p.softmax_scale : sum[i][part];
}

}  // namespace fattn::v2
