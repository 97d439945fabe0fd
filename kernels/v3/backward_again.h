// Inf and NaN that the mask hides. A hidden pair has weight 0, but 0 * Inf is NaN: gradients of rows that this may have spoilt are computed again
// from global memory, pair after pair of those that are seen. Seldom used: it has few registers, and time does not matter.
#pragma once

#include "kernels/constants.h"
#include "kernels/pair.h"
#include "kernels/ptx/convert.h"
#include "kernels/ptx/math.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/warp.h"
#include "kernels/v3/backward_fragments.h"
#include "kernels/v3/backward_schedule.h"
#include "kernels/v3/global_rows.h"

namespace fattn::v3 {

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

// Whether a row holds Inf or NaN. All lanes of a warp together, as below.
template <class Element>
__device__ __forceinline__ bool nonfinite(const GlobalRows<Element>& x, int row, int columns, int lane) {
  bool finite = true;
#pragma unroll 1
  for (int column = lane; column < columns; column += 32) finite = finite && is_finite(x.value(row, column));
  return !ptx::vote_all(finite);
}

template <class Element>
__device__ __forceinline__ float dot(const GlobalRows<Element>& a, int a_row, const GlobalRows<Element>& b, int b_row, int columns, int lane) {
  float sum = 0;
#pragma unroll 1
  for (int c = lane; c < columns; c += 32) sum = fmaf(a.value(a_row, c), b.value(b_row, c), sum);
#pragma unroll 1
  for (int lanes = 1; lanes < 32; lanes *= 2) sum += ptx::shfl_xor(sum, lanes);
  return sum;
}

// What a sum is multiplied by at the end: dk and dq (`scaled`), dv. Row sums are as if dropout's part of it were there already.
template <PairFeatures kPair>
__device__ __forceinline__ float gradient_factor(const AttentionParams& p, bool scaled) {
  const float factor = scaled ? p.softmax_scale : 1.0f;
  if constexpr (kPair.dropout) return factor * pairs_of(p).dropout_scale;
  return factor;
}

// Everything that a pair's weight and gradient need, of one query head, but for gradient_factor().
template <class Element, class Score, PairFeatures kPair>
struct HeadPairs {
  GlobalRows<Element> q, k, v, dout;
  int columns, columns_v;
  const float *lse_log2, *row_sum;
  float scale_log2;
  const AttentionParams& call;
  Terms<kPair, Element> terms;
  Dropout<kPair> dropout;

  // `keys`: that the batch entry has.
  template <class Keys>
  __device__ __forceinline__ HeadPairs(const BackwardCall& p, const EntryPlace<kPair.packed>& at, int head, Keys keys)
      : q(rows_of<Element>(p.call.q, p.call.q_strides, at.in_tensor(), head, at.first_query())),
        k(rows_of<Element>(p.call.k, p.call.k_strides, at.in_tensor(), head / p.call.group, at.first_key())),
        v(rows_of<Element>(p.call.v, p.call.v_strides, at.in_tensor(), head / p.call.group, at.first_key())),
        dout(rows_of<Element>(p.call.dout, p.call.dout_strides, at.in_tensor(), head, at.first_query())),
        columns(p.work.columns),
        columns_v(p.work.columns_v),
        lse_log2(p.work.lse_log2 + first_workspace_row(p, at, head)),
        row_sum(p.call.row_sum + first_workspace_row(p, at, head)),
        scale_log2(Score::exponent_scale(p.call)),
        call(p.call),
        terms(p.call, at.batch, head, keys.count(p.call)),
        dropout(p.call, at.batch, head) {
    if constexpr (kPair.packed && kPair.alibi) terms.shift = keys.count(p.call) - keys.queries(p.call);
    if constexpr (kPair.packed && kPair.documents) {
      terms.document_q = pairs_of(call).document_q + at.first_query();
      terms.document_k = pairs_of(call).document_k + at.first_key();
    }
  }

  // A row without a gradient.
  __device__ __forceinline__ bool empty(int row) const { return lse_log2[row] == kInfinity; }
  __device__ __forceinline__ float score(int row, int key, int lane) const {
    float score[1] = {dot(q, row, k, key, columns, lane)};
    Score::apply(score, call);
    return score[0];
  }
  __device__ __forceinline__ float weight_of(float score, int row, int key) const {
    if constexpr (kPair.terms())
      return ptx::ex2(__fmaf_rn(score, scale_log2, terms(row, key)) - lse_log2[row]);
    else
      return ptx::ex2(__fmaf_rn(score, scale_log2, -lse_log2[row]));
  }
  __device__ __forceinline__ float weight(int row, int key, int lane) const { return weight_of(score(row, key, lane), row, key); }
  // What the weight is multiplied with to give dS.
  __device__ __forceinline__ float slope(int row, int key, int lane) const {
    if (!stays(row, key)) return -row_sum[row];
    return dot(dout, row, v, key, columns_v, lane) - row_sum[row];
  }
  __device__ __forceinline__ bool sees(int row, int key) const {
    if constexpr (kPair.hides()) return terms.sees(row, key);
    return true;
  }
  __device__ __forceinline__ bool stays(int row, int key) const {
    if constexpr (kPair.dropout) return dropout.keeps(row, key);
    return true;
  }
  __device__ __forceinline__ float gradient(int row, int key, int lane) const {
    const float s = score(row, key, lane), by_score = Score::kCapped ? fmaf(-s, s, 1.0f) : 1.0f;
    return weight_of(s, row, key) * by_score * slope(row, key, lane);
  }

  // Whether a pair that is hidden spoils dv, dk or dq: 0 * Inf.
  __device__ __forceinline__ bool spoils_dv(int row, int, int lane) const { return nonfinite(dout, row, columns_v, lane); }
  __device__ __forceinline__ bool spoils_dk(int row, int key, int lane) const {
    return nonfinite(q, row, columns, lane) || !is_finite(slope(row, key, lane));
  }
  __device__ __forceinline__ bool spoils_dq(int row, int key, int lane) const {
    return nonfinite(k, key, columns, lane) || !is_finite(slope(row, key, lane));
  }
};

// A row of a gradient: the lane's columns are lane, lane + 32, ...
template <int kWidth>
struct GradientRow {
  float x[kWidth / 32] = {};

  template <class Element>
  __device__ __forceinline__ void add(float factor, const GlobalRows<Element>& rows, int row, int columns, int lane) {
#pragma unroll
    for (int i = 0; i < kWidth / 32; ++i)
      if (lane + 32 * i < columns) x[i] = fmaf(factor, rows.value(row, lane + 32 * i), x[i]);
  }
  // NaN in every column: nothing changes it any more.
  __device__ __forceinline__ bool lost(int columns, int lane) const {
    bool nan = true;
#pragma unroll
    for (int i = 0; i < kWidth / 32; ++i) nan = nan && (lane + 32 * i >= columns || x[i] != x[i]);
    return ptx::vote_all(nan);
  }
};

// Row `in_tile` of a tile in shared memory, which was written as write_gradient() does.
template <class Tile>
__device__ __forceinline__ unsigned element_place(unsigned tile, int in_tile, int column) {
  return tile + static_cast<unsigned>(column / 64 * Tile::kColumnBytes + in_tile * 128 + (((column / 8 % 8) ^ (in_tile % 8)) * 16) + column % 8 * 2);
}

// Where a row that was computed again goes: element_place() of its columns.
template <class Element, class Tile, int kWidth>
__device__ __forceinline__ void write_row(const GradientRow<kWidth>& gradient, float factor, unsigned tile, int in_tile, int lane) {
#pragma unroll
  for (int i = 0; i < kWidth / 32; ++i)
    ptx::st_shared_2(element_place<Tile>(tile, in_tile, lane + 32 * i),
                     static_cast<unsigned short>(ptx::pack2<Element>(gradient.x[i] * factor, 0.0f)));
}

// The warp's 16 rows of dv (or of dk, kIsDk) from `in_tile` on in a tile, those that hidden queries have spoilt.
template <class Spec, class Tile, bool kIsDk, int kWidth>
__device__ __forceinline__ void keys_again(const BackwardCall& p, TilePlace tile, unsigned in_shared, int in_tile, int lane) {
  using Element = typename Spec::Element;
  using Mask = typename Spec::Mask;
  using Pairs = HeadPairs<Element, typename Spec::Score, kPairOf<Spec>>;
  constexpr bool kPacked = kPairOf<Spec>.packed;
  const auto keys = tile.keys<kPairOf<Spec>.lengths, kPacked>();
  const int columns = kIsDk ? p.work.columns : p.work.columns_v;
  const int first_head = tile.head_k() * p.call.group;
#pragma unroll 1
  for (int nth = in_tile; nth < in_tile + 16; ++nth) {
    const int key = tile.key() + nth;
    if (key >= keys.count(p.call)) break;
    const int seen_from = Mask::first_row(p.call, keys, key), hidden_end = min(seen_from, keys.queries(p.call));
    bool spoilt = kPairOf<Spec>.hides();  // perhaps: hidden queries may be anywhere
#pragma unroll 1
    for (int head = first_head; head < first_head + p.call.group && !spoilt; ++head) {
      const Pairs pairs(p, tile.entry<kPacked>(), head, keys);
#pragma unroll 1
      for (int row = tile.first_row(); row < hidden_end && !spoilt; ++row)
        spoilt = kIsDk ? pairs.spoils_dk(row, key, lane) : pairs.spoils_dv(row, key, lane);
      if constexpr (Mask::kBegins || kPacked) {  // behind the last that sees the key; of packed sequences rows of the next ones too
        const int rows = min(tile.rows_end<Mask, kPacked>(p), tile.entry<kPacked>().queries_behind(p.call));
#pragma unroll 1
        for (int row = max(tile.first_row(), row_end<Mask>(p.call, keys, key)); row < rows && !spoilt; ++row)
          spoilt = kIsDk ? pairs.spoils_dk(row, key, lane) : pairs.spoils_dv(row, key, lane);
      }
    }
    if (!spoilt) continue;
    GradientRow<kWidth> gradient;
#pragma unroll 1
    for (int head = first_head; head < first_head + p.call.group; ++head) {
      const Pairs pairs(p, tile.entry<kPacked>(), head, keys);
#pragma unroll 1
      for (int row = seen_from; row < row_end<Mask>(p.call, keys, key) && !gradient.lost(columns, lane); ++row) {
        if (pairs.empty(row) || !pairs.sees(row, key)) continue;
        if constexpr (kIsDk)
          gradient.add(pairs.gradient(row, key, lane), pairs.q, row, columns, lane);
        else
          gradient.add(pairs.stays(row, key) ? pairs.weight(row, key, lane) : 0.0f, pairs.dout, row, columns, lane);
      }
    }
    write_row<Element, Tile>(gradient, gradient_factor<kPairOf<Spec>>(p.call, kIsDk), in_shared, nth, lane);
  }
}

}  // namespace fattn::v3
