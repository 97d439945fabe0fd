// A row of o and lse by IEEE rules from global memory, by one warp: where the matrix products gave Inf or NaN. That is right, or a number was beyond
// what they can take, or an Inf met a weight of 0 or a part of a number. Seldom used, so small rather than fast.
#pragma once

#include "kernels/constants.h"
#include "kernels/pair.h"
#include "kernels/ptx/math.h"
#include "kernels/score.h"
#include "kernels/v2/global_row.h"
#include "kernels/v2/schedule.h"
#include "shared/mask.h"

namespace fattn::v2 {

// Spec: as in forward_f32.h.
template <class Spec>
__device__ __forceinline__ void forward_row_again(const AttentionParams& p, const Place& place, int row, const core::Mask32& mask, int lane) {
  constexpr int kHeaddim = Spec::kHeaddim, kHeaddimV = Spec::kHeaddimV;
  constexpr PairFeatures kPair = kPairOf<Spec>;
  constexpr bool kTerms = kPair.terms(), kHides = kPair.hides();
  const int begin = Spec::kWindow ? mask.visible_begin(row) : 0, end = mask.visible_end(row);
  const HeadRows q(p.q, p.q_strides, place.batch, place.head), k(p.k, p.k_strides, place.batch, place.head_k),
      v(p.v, p.v_strides, place.batch, place.head_k);
  const float sign = p.softmax_scale > 0 ? 1.0f : p.softmax_scale < 0 ? -1.0f : 0.0f;
  [[maybe_unused]] const Terms<kPair, f16> terms(p, place.batch, place.head, mask.seqlen_k);
  [[maybe_unused]] const Dropout<kPair> dropout(p, place.batch, place.head);
  const auto scale = [&] { return kTerms ? 1.0f : p.softmax_scale_log2; };  // of scores to units of log2: with terms they are in them already
  const auto score = [&](int key) {
    const float product = warp_dot(q.row(row), sign, k.row(key), kHeaddim, lane);
    const float s = Spec::kCapped ? capped_closely<Spec>(p, product) : product;
    if constexpr (kTerms) return with_term<kHides>(s, p.softmax_scale_log2, terms(row, key));
    return s;
  };

  float greatest = -kInfinity;  // a NaN stays
#pragma unroll 1
  for (int key = begin; key < end; ++key) {
    const float s = score(key);
    if (s > greatest || s != s) greatest = s;
  }
  const bool empty = greatest == -kInfinity;
  const float reference = greatest * scale();
  float o[(kHeaddimV + 31) / 32] = {}, sum = 0;
#pragma unroll 1
  for (int key = begin; key < end && !empty; ++key) {
    if constexpr (kHides)
      if (!terms.sees(row, key)) continue;
    float weight = ptx::ex2((score(key) - greatest) * scale());  // 1 at the maximum, however large that is
    sum += weight;
    if constexpr (kPair.dropout) weight = dropout.keeps(row, key) ? weight * pairs_of(p).dropout_scale : 0.0f;
#pragma unroll
    for (int i = 0; i < (kHeaddimV + 31) / 32; ++i)
      if (lane + 32 * i < kHeaddimV) o[i] = fmaf(weight, v.row(key)[lane + 32 * i], o[i]);
  }
  [[maybe_unused]] float sinked_lse;
  if constexpr (kPair.sinks) {
    const SinkedRow<> sinked(sink_of(pairs_of(p), place.head), -reference, sum, empty);
    sum = sinked.sum;
    sinked_lse = sinked.lse;
  }
  float* to = static_cast<float*>(p.o) + place.batch * p.o_strides.batch + place.head * p.o_strides.head + row * p.o_strides.row;
#pragma unroll
  for (int i = 0; i < (kHeaddimV + 31) / 32; ++i)
    if (lane + 32 * i < kHeaddimV) to[lane + 32 * i] = empty ? 0.0f : o[i] / sum;
  if (p.lse != nullptr && lane == 0) {
    constexpr float kLn2 = 0.693147180559945309f;
    p.lse[place.batch * p.lse_strides.batch + row * p.lse_strides.row + place.head * p.lse_strides.head] = kPair.sinks ? sinked_lse
                                                                                                           : empty     ? -kInfinity
                                                                                                                   : fmaf(reference, kLn2, logf(sum));
  }
}

}  // namespace fattn::v2
