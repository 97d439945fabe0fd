// Inf and NaN in values of keys that some rows of a tile see and others do not. They were taken out of the block (v3/forward_values.h), and go to the
// rows that see them here, when the tile is done: a product counts, for each element of o, those that its row sees, of 16 keys at a time.
#pragma once

#include "kernels/ptx/mma.h"
#include "kernels/ptx/warp.h"
#include "kernels/v3/forward_shape.h"
#include "kernels/v3/global_rows.h"
#include "kernels/v3/schedule.h"
#include "kernels/v3/spoilt_notes.h"

namespace fattn::v3 {

// A tile's keys or values.
template <class Element>
__device__ __forceinline__ GlobalRows<Element> keys_at(const void* tensor, const TensorStrides& strides, const Place& place) {
  return rows_of<Element>(tensor, strides, place.batch, place.head_k);
}
template <class Element>
__device__ __forceinline__ GlobalRows<Element> keys_at(const void* tensor, const TensorStrides& strides, const PackedPlace& place) {
  return rows_of<Element>(static_cast<const unsigned short*>(tensor) + place.k_begin * strides.row, strides, 0, place.head_k);
}

// Whether a pair is of one document.
__device__ __forceinline__ bool same_document(const AttentionParams& call, const Place& place, int row, int key) {
  const PairParams& p = pairs_of(call);
  return p.document_q[place.batch * p.document_q_stride + row] == p.document_k[place.batch * p.document_k_stride + key];
}
__device__ __forceinline__ bool same_document(const AttentionParams& call, const PackedPlace& place, int row, int key) {
  return pairs_of(call).document_q[place.q_begin + row] == pairs_of(call).document_k[place.k_begin + key];
}

// Whether documents, bias and mask let a query see a key.
template <class Spec, class Place>
__device__ __forceinline__ bool sees(const AttentionParams& call, const Place& place, int row, int key) {
  if constexpr (kPairOf<Spec>.documents) return same_document(call, place, row, key);
  if constexpr (kPairTerms<Spec>) return Terms<kPairOf<Spec>, typename Spec::Element>(call, place.batch, place.head, 0).sees(row, key);
  return true;
}

// To o, in the accumulators' layout, of the warp whose first row in the tile is `warp_row`: Inf and NaN that there are notes of, as if with
// weight 1, since the sign is all that a weight leaves of them. All lanes together.
template <class Spec, class Place>
__device__ __forceinline__ void add_spoilt_values(float (&o)[Spec::kHeaddimV / 2], const ForwardCall& p, const Place& place, int warp_row, int nth,
                                                  const SpoiltNotes<Spec>& notes, int lane) {
  using Element = typename Spec::Element;
  using Mask = typename Spec::Mask;
  constexpr int kBlockN = Spec::kBlockN, kBlockM = ForwardShape<Spec>::kBlockM;
  const AttentionParams& call = p.call;
  const auto keys = keys_of<Spec>(call, place);
  const int row = place.row + warp_row + lane / 4, keys_here = place.keys_behind(call), columns = p.work.columns_v - lane / 4;
  const auto values = keys_at<Element>(call.v, call.v_strides, place);
  // Bit r: row + 8 r has elements that may still change. Whatever there is, NaN stays as it is, and Inf where there is none of the other sign.
  unsigned left = (row < keys.queries(call) ? 1u : 0u) | (row + 8 < keys.queries(call) ? 2u : 0u);
  const int behind = block_end<Mask, kBlockN>(call, keys, place.row, kBlockM);
#pragma unroll 1
  for (int block = block_begin<Mask, kBlockN>(call, keys, place.row); block < behind; ++block) {
#pragma unroll 1
    for (unsigned steps = notes.steps(nth, block); steps != 0; steps &= steps - 1) {
      const int key = block * kBlockN + (__ffs(static_cast<int>(steps)) - 1) * kStepKeys + lane % 4 * 2;
      unsigned pairs = 0;  // a bit each, if it is seen: of the row's two keys, those 8 further, and likewise of the other row
#pragma unroll 1
      for (int r = 0; r < 2; ++r) {
        if ((left >> r & 1) == 0) continue;
        const int own = row + 8 * r, begin = visible_begin<Mask>(call, keys, own), end = Mask::visible_end(call, keys, own);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = key + i / 2 * 8 + i % 2;
          if (begin <= at && at < end && sees<Spec>(call, place, own, at)) pairs |= 1u << 4 * r + i;
        }
      }
      if (ptx::vote_all(pairs == 0)) continue;
      unsigned seen[4];  // 1 for pairs that are seen
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const unsigned two = pairs >> (i % 2 * 4 + i / 2 * 2);
        seen[i] = (two & 1) * 0x3f80u | (two >> 1 & 1) * 0x3f800000u;
      }
      const unsigned short* const from = values.first + key * values.stride + lane / 4;
      const unsigned kinds = notes.kinds(nth);
#pragma unroll 1
      for (unsigned kind = kSpoiltPlus; kind <= kSpoiltMinus; kind *= 2) {
        if ((kinds & kind) == 0) continue;
        const unsigned sign = kind == kSpoiltPlus ? kPlus2<Element> : kMinus2<Element>;
        const float huge = kind == kSpoiltPlus ? 0x1p127f : -0x1p127f;  // times a count in units of kNonfiniteBits it is Inf
#pragma unroll
        for (int n = 0; n < Spec::kHeaddimV / 8; ++n) {
          unsigned x[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int further = i / 2 * 8 + i % 2;
            x[i] = 8 * n < columns && key + further < keys_here ? from[further * values.stride + 8 * n] : 0u;
          }
          float count[4] = {0, 0, 0, 0};
          ptx::mma_m16n8k16_bf16(count, seen, nonfinite_halves<Element>(x[0] | x[1] << 16, sign), nonfinite_halves<Element>(x[2] | x[3] << 16, sign));
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (count[e] != 0) o[4 * n + e] += __fmul_rn(count[e], huge);  // not in one: only the product is Inf
        }
      }
      left = 0;
      const float stays = kinds == kSpoiltPlus ? kInfinity : kinds == kSpoiltMinus ? -kInfinity : __uint_as_float(0x7fffffffu);
#pragma unroll
      for (int word = 0; word < (Spec::kHeaddimV + 31) / 32; ++word) {
        const unsigned spoilt = notes.spoilt_columns(nth, word) >> lane % 4 * 2;
#pragma unroll
        for (int i = 16 * word; i < min(16 * word + 16, Spec::kHeaddimV / 2); ++i)
          if ((spoilt >> (i / 4 % 4 * 8 + i % 2) & 1) != 0 && o[i] == o[i] && o[i] != stays) left |= 1u << (i >> 1 & 1);
      }
      left |= ptx::shfl_xor(left, 1);
      left |= ptx::shfl_xor(left, 2);
      if (row >= keys.queries(call)) left &= 2;
      if (row + 8 >= keys.queries(call)) left &= 1;
      if (ptx::vote_all(left == 0)) return;
    }
  }
}

}  // namespace fattn::v3
