// Queries and weights of the fp32 consumer (v3/forward_f32_consumer.h): numbers of q split in two parts, and P = exp2(S scale - m).
#pragma once

#include "kernels/v3/forward_f32_consumer.h"

namespace fattn::v3 {

template <class Spec>
__device__ __forceinline__ void ConsumerF32<Spec>::load_queries(const Place& place, Queries& x) const {
  const auto* const q = static_cast<const float*>(p.call.q) + place.batch * p.call.q_strides.batch + place.head * p.call.q_strides.head;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = place.row + own_row() + 8 * r, first = lane() % 4 * 2;
    const float* const from = q + row * p.call.q_strides.row + first;
#pragma unroll
    for (int unit = 0; unit < 2 * kDepth; ++unit) {  // 8 columns
      float* const to = x[unit / 2] + (unit % 2 * 2 + r) * 2;
      const int left = row < p.call.seqlen_q ? Spec::kHeaddim - unit * 8 - first : 0;  // columns
      if constexpr (Spec::kAligned) {
        const float2 two = left > 0 ? *reinterpret_cast<const float2*>(from + unit * 8) : float2{0, 0};
        to[0] = two.x;
        to[1] = two.y;
      } else {
        to[0] = left > 0 ? from[unit * 8] : 0.0f;
        to[1] = left > 1 ? from[unit * 8 + 1] : 0.0f;
      }
    }
  }
}

// Splits them, each row by a factor of its own. A scale that is negative or 0 goes into them: the maximum of the scores is then that of the logits.
template <class Spec>
__device__ __forceinline__ void ConsumerF32<Spec>::split_queries(const Queries& x) {
  const float sign = p.call.softmax_scale > 0 ? 1.0f : p.call.softmax_scale < 0 ? -1.0f : 0.0f;
  float of_row[2];
  bool infinite = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float greatest = 0;
#pragma unroll
    for (int i = 0; i < 4 * kDepth; ++i) {
      const float a = fabsf(x[i / 4][(i / 2 % 2 * 2 + r) * 2 + i % 2]);
      greatest = a < kInfinity ? fmaxf(greatest, a) : greatest;  // neither Inf nor NaN
      infinite = infinite || a == kInfinity;
    }
    greatest = fmaxf(greatest, ptx::shfl_xor(greatest, 1));
    greatest = fmaxf(greatest, ptx::shfl_xor(greatest, 2));
    const tile::SplitFactor split(greatest);
    of_row[r] = split.factor * sign;
    row_scale[r] = p.call.softmax_scale_log2 * split.inverse;
  }
  reach = infinite ? 0.0f : tile::kGreatestSplitScale<Spec::kHeaddim> / fmaxf(row_scale[0], row_scale[1]);
  if constexpr (!kQueriesInRegisters) ptx::bar_sync(kOwnBarrier + group, 128);  // every warp's products with those before are done
#pragma unroll
  for (int step = 0; step < kDepth; ++step) {
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const float by = of_row[word % 2];
      unsigned of_high, of_low;
      tile::split2(x[step][2 * word] * by, x[step][2 * word + 1] * by, of_high, of_low);
      if constexpr (kQueriesInRegisters) {
        q_high[step][word] = of_high;
        q_low[step][word] = of_low;
      } else {
        constexpr int kUnits = 8;  // of a column
        const int unit = 2 * step + word / 2, row = own_row() % 64 + word % 2 * 8;
        const unsigned to = query_tile() + static_cast<unsigned>(unit / kUnits * Shape::TileQ::kColumnBytes + row * 128 +
                                                                 ((unit % kUnits) ^ (row % 8)) * 16 + lane() % 4 * 4);
        ptx::st_shared_4(to, of_high);
        ptx::st_shared_4(to + Shape::TileQ::kBytes, of_low);
      }
    }
  }
  if constexpr (!kQueriesInRegisters) {
    ptx::async_proxy_fence();
    ptx::bar_sync(kOwnBarrier + group, 128);
  }
}

// Scores become weights, after the references were found or renewed. The result says whether o has to be multiplied by `factor`.
template <class Spec>
template <bool kFirst>
__device__ __forceinline__ bool ConsumerF32<Spec>::weigh(float inverse) {
  float top[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) top[i] = fmaxf(s[2 * i], s[2 * i + 1]);
#pragma unroll
  for (int i = 8; i < kScores; i += 8) {
#pragma unroll
    for (int j = 0; j < 4; ++j) top[j] = fmaxf(top[j], fmaxf(s[i + 2 * j], s[i + 2 * j + 1]));
  }
  float scale[2], add[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    scale[r] = row_scale[r] * inverse;
    float x = fmaxf(top[r], top[r + 2]);
    x = fmaxf(x, ptx::shfl_xor(x, 1));
    x = fmaxf(x, ptx::shfl_xor(x, 2));
    const float wanted = -(x * scale[r]);  // perhaps NaN: then no reference
    if constexpr (kFirst) {
      shift[r] = fminf(kInfinity, wanted);
    } else {
      const float before = shift[r];
      const bool renew = wanted < before - kF32Patience;
      shift[r] = renew ? wanted : before;
      factor[r] = renew ? ptx::ex2(wanted - before) : 1.0f;
      sum[r] *= factor[r];
    }
    add[r] = shift[r] == kInfinity ? 0.0f : shift[r];  // weights of a row without a visible key are 0, not NaN
  }
  float partial[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    s[i] = ptx::ex2(fmaf(s[i], scale[i >> 1 & 1], add[i >> 1 & 1]));
    partial[i >> 1 & 3] += s[i];
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) sum[r] = (kFirst ? 0.0f : sum[r]) + (partial[r] + partial[r + 2]);
  return !kFirst && !ptx::vote_all(factor[0] == 1.0f && factor[1] == 1.0f);
}

}  // namespace fattn::v3
