// A row of o and lse by IEEE rules from global memory, by one warp: where the matrix products gave Inf or NaN. That is right, or a number was beyond
// what they can take, or an Inf met a weight of 0 or a part of a number. Seldom used, so small rather than fast.
#pragma once

#include "kernels/constants.h"
#include "kernels/ptx/math.h"
#include "kernels/v2/global_row.h"
#include "kernels/v2/schedule.h"

namespace fattn::v2 {

// Row `row` sees the keys [0, end).
template <int kHeaddim, int kHeaddimV>
__device__ __forceinline__ void forward_row_again(const AttentionParams& p, const Place& place, int row, int end, int lane) {
  const HeadRows q(p.q, p.q_strides, place.batch, place.head), k(p.k, p.k_strides, place.batch, place.head_k),
      v(p.v, p.v_strides, place.batch, place.head_k);
  const float sign = p.softmax_scale > 0 ? 1.0f : p.softmax_scale < 0 ? -1.0f : 0.0f;
  const auto score = [&](int key) { return warp_dot(q.row(row), sign, k.row(key), kHeaddim, lane); };

  float greatest = -kInfinity;  // a NaN stays
#pragma unroll 1
  for (int key = 0; key < end; ++key) {
    const float s = score(key);
    if (s > greatest || s != s) greatest = s;
  }
  const bool empty = greatest == -kInfinity;
  const float reference = greatest * p.softmax_scale_log2;
  float o[(kHeaddimV + 31) / 32] = {}, sum = 0;
#pragma unroll 1
  for (int key = 0; key < end && !empty; ++key) {
    const float weight = ptx::ex2(fmaf(score(key), p.softmax_scale_log2, -reference));
    sum += weight;
#pragma unroll
    for (int i = 0; i < (kHeaddimV + 31) / 32; ++i)
      if (lane + 32 * i < kHeaddimV) o[i] = fmaf(weight, v.row(key)[lane + 32 * i], o[i]);
  }
  float* to = static_cast<float*>(p.o) + place.batch * p.o_strides.batch + place.head * p.o_strides.head + row * p.o_strides.row;
#pragma unroll
  for (int i = 0; i < (kHeaddimV + 31) / 32; ++i)
    if (lane + 32 * i < kHeaddimV) to[lane + 32 * i] = empty ? 0.0f : o[i] / sum;
  if (p.lse != nullptr && lane == 0) {
    constexpr float kLn2 = 0.693147180559945309f;
    p.lse[place.batch * p.lse_strides.batch + row * p.lse_strides.row + place.head * p.lse_strides.head] =
        empty ? -kInfinity : fmaf(reference, kLn2, logf(sum));
  }
}

}  // namespace fattn::v2
