// What leaves a tile of the forward pass in fp32 (kernels/v2/forward_f32.h):  o = O / sum    lse = ln 2 (m + log2 sum)
// Values that are not finite are added to the rows that see them, and rows that are no numbers are computed again.
#pragma once

#include "kernels/constants.h"
#include "kernels/mask.h"
#include "kernels/pair.h"
#include "kernels/ptx/reduce.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/sequence.h"
#include "kernels/v2/forward_f32_again.h"
#include "kernels/v2/forward_f32_spoilt.h"
#include "kernels/v2/forward_f32_state.h"
#include "kernels/v2/rows_again.h"
#include "kernels/v2/schedule.h"

namespace fattn::v2 {

// Adds the values of block j that are not finite to the rows that see them.
template <class Spec>
__device__ __forceinline__ void ForwardF32<Spec>::add_spoilt(int j, int seqlen_k) {
  // Found again rather than kept in registers all the way, unless that takes more of them.
  constexpr bool kLengthsAlone = kPair.lengths && !kPair.packed && !Spec::kCausal && !kWindow;
  constexpr bool kKept = !kTerms && (kLengthsAlone || (kWindow && Spec::kCapped) || (kPair.packed && !Spec::kAligned));
  const core::Mask32 mask = visible_mask(kKept ? seqlen_k : ptx::opaque(seqlen_k));
  const Place place = place_of<Shape::kBlockM>(call(), ptx::opaque(static_cast<int>(blockIdx.x)));
  const auto& p = entry_params<kPair, float>(call(), place.batch);
  const auto [warp, lane] = ptx::thread_place();
  const int row = place.row + warp * Shape::kWarpRows + lane / 4;
  const Terms<kPair, f16> terms(p, place.batch, place.head, mask.seqlen_k);
  add_spoilt_values<kRowTiles, Spec::kHeaddimV>(
      value_rows<kPair.paged>(p, place.batch, place.head_k), j * Spec::kBlockN, min((j + 1) * Spec::kBlockN, mask.seqlen_k), lane,
      [&](int i, int n, int half, int e) -> float& { return o[i][n][2 * half + e]; },
      [&](int i, int half) { return row + 16 * i + 8 * half < p.seqlen_q; },
      [&](int i, int half, int key) {
        const int query = row + 16 * i + 8 * half;
        if (query >= p.seqlen_q || key >= mask.visible_end(query) || (kWindow && key < mask.visible_begin(query))) return false;
        return !kPair.hides() || terms.sees(query, key);
      });
}

// Writes the warp's rows of o and lse.
template <class Spec>
__device__ __forceinline__ void ForwardF32<Spec>::finish(const core::Mask32& mask) const {
  // Found again rather than kept in registers all the way.
  const Place place = place_of<Shape::kBlockM>(call(), ptx::opaque(static_cast<int>(blockIdx.x)));
  const auto& p = entry_params<kPair, float>(call(), place.batch);
  const auto [warp, lane] = ptx::thread_place();
  const int first = place.row + warp * Shape::kWarpRows;
  float* const out = static_cast<float*>(p.o) + place.batch * p.o_strides.batch + place.head * p.o_strides.head;
  RowsAgain again;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = softmax.sum[i][half];
      sum += ptx::shfl_xor(sum, 1);
      sum += ptx::shfl_xor(sum, 2);
      if constexpr (kPair.lengths && !kPair.paged) sum += first_sum<kPair>(p, place.batch);
      // With scores beyond 1e8 the greatest weight may be rounded to 0: such rows are not empty. (Above headdim 192 no register is left to see it.)
      const bool empty = sum == 0 && (Spec::kHeaddimV > 192 || softmax.shift[i][half] == kInfinity);
      [[maybe_unused]] float sinked_lse;
      [[maybe_unused]] const bool lost = sum == 0;
      if constexpr (kPair.sinks) {
        const float sink = sink_of(pairs_of(p), place.head);
        const SinkedRow<> sinked(sink, sink_exponent<(kTerms || Spec::kCapped || Spec::kHeaddimV > 192)>(p, sink, softmax.shift[i][half]),
                                 softmax.shift[i][half], sum, empty);
        sum = sinked.sum;
        sinked_lse = sinked.lse;
      }
      const float inverse = (kPair.dropout ? pairs_of(p).dropout_scale : 1.0f) / (own_bits<Spec>() ? sum : sum * kWeightFactor);
      const int row = first + i * 16 + half * 8 + lane / 4;
      bool near = true, finite = true;
      if constexpr (!own_bits<Spec>() && (kWindow || kPair.any()) && !kTerms && !Spec::kCapped)
        near = fabsf(softmax.shift[i][half]) < kGreatestReference;
#pragma unroll
      for (int n = 0; n < (Spec::kHeaddimV + 7) / 8; ++n) {
        const float x[2] = {o[i][n][2 * half] * inverse, o[i][n][2 * half + 1] * inverse};
        finite = finite && is_finite(x[0]) && is_finite(x[1]);
        const int column = 8 * n + lane % 4 * 2;
        if (row >= p.seqlen_q) continue;
        float* to = out + row * p.o_strides.row + column;
        if constexpr (Spec::kAligned && Spec::kHeaddimV % 8 == 0) {
          *reinterpret_cast<float2*>(to) = empty ? float2{0, 0} : float2{x[0], x[1]};
        } else {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (column + e < Spec::kHeaddimV) to[e] = empty ? 0.0f : x[e];
          }
        }
      }
      if (p.lse != nullptr && lane % 4 == 0 && row < p.seqlen_q) {
        constexpr float kLn2 = 0.693147180559945309f;
        p.lse[place.batch * p.lse_strides.batch + row * p.lse_strides.row + place.head * p.lse_strides.head] =
            kPair.sinks ? sinked_lse
            : empty     ? -kInfinity
                        : fmaf(-softmax.shift[i][half], kLn2, logf(sum));
      }
      // NaN is right where a number was NaN, and what is not finite where values were not.
      bool good = own_bits<Spec>() ? finite && sum == sum
                  : !kNotesOdd     ? near && finite
                  : sum == sum     ? near && (finite || notes().some_spoilt())
                                   : !notes().scores_in_doubt();
      if constexpr (kPair.sinks) good = good && !lost;
      again.note(2 * i + half, ptx::ballot(!good && !empty && row < p.seqlen_q));
    }
  }
  if constexpr (kPair.paged) {
    if (mask.seqlen_k < 0) return;  // NaN it shall be
  } else {
    if (kPair.lengths && given_length(p, place.batch) < 0) return;
  }
  constexpr int kRows = Spec::kHeaddimV <= 192 ? kRowsAgain : 4;  // for which there are registers
  again.for_each<kRows>([&](int row, unsigned wanted) { forward_rows_again<Spec, kRows>(p, place, first + row, wanted, mask, lane); });
}

}  // namespace fattn::v2
