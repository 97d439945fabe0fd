// Rows of o and lse by IEEE rules from global memory, by one warp: where the matrix products gave Inf or NaN. That is right, or a number was beyond
// what they can take, or an Inf met a weight of 0 or a part of a number.
#pragma once

#include "device_abi/mask.h"
#include "kernels/constants.h"
#include "kernels/pair.h"
#include "kernels/ptx/math.h"
#include "kernels/ptx/reduce_warp.h"
#include "kernels/score.h"
#include "kernels/v2/own_bits.h"
#include "kernels/v2/rows_again.h"
#include "kernels/v2/schedule.h"

namespace fattn::v2 {

// Of the kRows rows from `first` on those with a bit in `wanted`. Spec: as in forward_f32.h.
template <class Spec, int kRows>
__device__ __forceinline__ void forward_rows_again(const AttentionParams& p, const Place& place, int first, unsigned wanted, const core::Mask32& mask,
                                                   int lane) {
  constexpr int kHeaddim = Spec::kHeaddim, kHeaddimV = Spec::kHeaddimV, kParts = (kHeaddimV + 31) / 32;
  constexpr PairFeatures kPair = kPairOf<Spec>;
  constexpr bool kTerms = kPair.terms(), kHides = kPair.hides();
  // With kOwnBits the keys of a lane do not follow from the other rows.
  const int last = p.seqlen_q - 1, seen_from = Spec::kWindow ? mask.visible_begin(first) : 0,
            begin = own_bits<Spec>() ? seen_from / 32 * 32 : seen_from, end = mask.visible_end(min(first + kRows - 1, last));
  const HeadRows q(p.q, p.q_strides, place.batch, place.head);
  const auto k = key_rows<kPair.paged>(p, place.batch, place.head_k), v = value_rows<kPair.paged>(p, place.batch, place.head_k);
  const float sign = p.softmax_scale > 0 ? 1.0f : p.softmax_scale < 0 ? -1.0f : 0.0f;
  [[maybe_unused]] const Terms<kPair, f16> terms(p, place.batch, place.head, mask.seqlen_k);
  [[maybe_unused]] const Dropout<kPair> dropout(p, place.batch, place.head);
  const float scale = kTerms ? 1.0f : p.softmax_scale_log2;  // of scores to units of log2: with terms they are in them already

  float o[kRows][kParts], sum[kRows], greatest[kRows];  // sums of this lane's keys; NaN or Inf stays
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    sum[i] = 0;
    greatest[i] = -kInfinity;
#pragma unroll
    for (int part = 0; part < kParts; ++part) o[i][part] = 0;
  }
  bool values_matter = true;
  // From the last keys on: Inf among them, as in what nobody has filled yet, ends it at once.
#pragma unroll 1
  for (int block = begin + (max(end - begin, 0) + 31) / 32 * 32 - 32; block >= begin; block -= 32) {
    const int key = block + lane;
    float s[kRows];
    products_again<Spec::kAligned>(s, k.row(min(key, end - 1)), q, first, last, kHeaddim);
    unsigned taken = 0;
    bool open = false;  // some score is wanted still
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = min(first + i, last);
      bool seen = key < mask.visible_end(row);
      if constexpr (Spec::kWindow) seen = seen && key >= mask.visible_begin(row);
      float score = s[i] * sign;
      score = Spec::kCapped ? capped_closely<Spec>(p, score) : score;
      if constexpr (kTerms) {
        score = with_term<kHides>(score, p.softmax_scale_log2, seen ? terms(row, key) : 0.0f);
        if constexpr (kHides) seen = seen && terms.sees(row, key);
      }
      const float before = greatest[i], top = ptx::warp_max(seen ? score : -kInfinity);
      greatest[i] = top > before || top != top ? top : before;
      const bool none = greatest[i] == -kInfinity;
      // 1 at the maximum, however large that is.
      const float factor = before == greatest[i] ? 1.0f : ptx::ex2((before - greatest[i]) * scale);
      float weight = !seen || none ? 0.0f : ptx::ex2((score - greatest[i]) * scale);
      sum[i] = fmaf(sum[i], factor, weight);
      if (factor != 1) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) o[i][part] *= factor;
      }
      if constexpr (kPair.dropout) weight = seen && dropout.keeps(row, key) ? weight * pairs_of(p).dropout_scale : 0.0f;
      s[i] = weight;
      taken |= seen && !none ? 1u << i : 0u;
      open = open || ((wanted >> i & 1) != 0 && greatest[i] < kInfinity);
    }
    if (values_matter) add_rows_again<kHeaddimV>(o, s, taken, v, block, min(32, end - block), 0, lane);
    if (!open) break;
    values_matter = values_matter && some_may_change<kHeaddimV>(o, wanted, 0, lane);
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    float all = sum[i];
#pragma unroll 1
    for (int lanes = 1; lanes < 32; lanes *= 2) all += ptx::shfl_xor(all, lanes);
    if ((wanted >> i & 1) == 0) continue;
    const int row = first + i;
    const bool empty = greatest[i] == -kInfinity, nan = !(greatest[i] < kInfinity);
    [[maybe_unused]] float sinked_lse;
    if constexpr (kPair.sinks) {
      const float sink = sink_of(pairs_of(p), place.head), shift = -greatest[i] * scale;
      const SinkedRow<> sinked(sink, sink_exponent<(kTerms || Spec::kCapped)>(p, sink, shift), shift, all, empty);
      all = sinked.sum;
      sinked_lse = sinked.lse;
    }
    float* to = static_cast<float*>(p.o) + place.batch * p.o_strides.batch + place.head * p.o_strides.head + row * p.o_strides.row;
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      if (lane + 32 * part < kHeaddimV) to[lane + 32 * part] = empty ? 0.0f : nan ? kNan : o[i][part] / all;
    if (p.lse != nullptr && lane == 0) {
      constexpr float kLn2 = 0.693147180559945309f;
      p.lse[place.batch * p.lse_strides.batch + row * p.lse_strides.row + place.head * p.lse_strides.head] =
          kPair.sinks ? (nan && !empty ? kNan : sinked_lse)
          : empty     ? -kInfinity
          : nan       ? kNan
                      : fmaf(greatest[i] * scale, kLn2, logf(all));
    }
  }
}

}  // namespace fattn::v2
