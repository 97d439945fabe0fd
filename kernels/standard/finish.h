// Algorithm standard: rows of an output after its product. Sums over a group of heads get their dtype; a row with a NaN that may come from a hidden
// pair, whose weight of 0 the product took times a NaN or Inf, is computed again from what it sees. Few rows are, so that is small rather than fast.
//
// Spec: Element, kAligned, kQueries (a row is a query: o, dq; else a key: dk, dv), kThreads, and kPair with features that hide pairs.
#pragma once

#include "kernels/constants.h"
#include "kernels/ptx/warp.h"
#include "kernels/standard/row.h"
#include "shared/lowest.h"

namespace fattn::standard {

template <class Spec>
class FinishRows {
  using Element = typename Spec::Element;
  static constexpr int kWidth = kUnit<Element>;
  static constexpr PairFeatures kPair = kPairOf<Spec>;
  using HeadTerms = Terms<kPair, BiasElement<Element>>;

  struct Place {
    long long batch;
    int head, index;
    __device__ Place(const StandardFinishParams& p, long long number) {
      const int seqlen = Spec::kQueries ? p.mask.seqlen_q : p.mask.seqlen_k;
      index = static_cast<int>(number % seqlen);
      head = static_cast<int>(number / seqlen % p.heads);
      batch = number / seqlen / p.heads;
    }
    __device__ long long in(const StandardStrides& s) const { return batch * s.batch + head * s.head + index * s.row; }
  };

  __device__ static float pair(const StandardFinishParams& p, long long batch, int head, int query, int key) {
    const StandardStrides& s = p.matrix.strides;
    return widened<Element>(static_cast<const Bits<Element>*>(p.matrix.data)[batch * s.batch + head * s.head + query * s.row + key]);
  }
  __device__ static float other(const StandardFinishParams& p, long long batch, int head, int row, int column) {
    const StandardStrides& s = p.other_strides;
    return widened<Element>(static_cast<const Bits<Element>*>(p.other)[batch * s.batch + head * s.head + row * s.row + column]);
  }
  __device__ static float lse_of(const StandardFinishParams& p, long long batch, int head, int query) {
    const StandardStrides& s = p.lse_strides;
    return p.lse[batch * s.batch + head * s.head + query * s.row];
  }

  __device__ static float column_of_query(const StandardFinishParams& p, const Place& at, int column) {
    float sum = 0;
    bool weighed = false;  // whether a pair has a weight: forward a row without, of scores of -inf, is empty
    const EntryKeys<kPair> entry(p.pairs, p.mask, at.batch);
    if (entry.lost) return __uint_as_float(0x7fffffffu);
    const int keys = entry.count;
    const core::Mask32 mask = mask_of(p.mask, keys);
    const HeadTerms terms(p.pairs, static_cast<int>(at.batch), at.head, keys);
    for (int key = mask.visible_begin(at.index); key < mask.visible_end(at.index); ++key) {
      if (kPair.hides() && !terms.sees(at.index, key)) continue;
      const float weight = pair(p, at.batch, at.head, at.index, key);
      weighed = weighed || (kPair.dropout ? __float_as_uint(weight) != 0x80000000u : weight != 0);
      sum += weight * other(p, at.batch, at.head / p.group, key, column);
    }
    const bool empty = p.lse ? lse_of(p, at.batch, at.head, at.index) < kLowestLse : !weighed;
    return empty ? 0.0f : sum;
  }
  __device__ static float column_of_key(const StandardFinishParams& p, const Place& at, int column) {
    const EntryKeys<kPair> entry(p.pairs, p.mask, at.batch);
    if (entry.lost) return __uint_as_float(0x7fffffffu);
    const int keys = entry.count;
    const core::Mask32 mask = mask_of(p.mask, keys);
    float sum = 0;
    if (at.index >= keys) return sum;
    for (int head = at.head * p.group; head < (at.head + 1) * p.group; ++head) {
      const HeadTerms terms(p.pairs, static_cast<int>(at.batch), head, keys);
      for (int query = mask.first_row(at.index); query < mask.row_end(at.index); ++query) {
        if (lse_of(p, at.batch, head, query) < kLowestLse || (kPair.hides() && !terms.sees(query, at.index))) continue;
        sum += pair(p, at.batch, head, query, at.index) * other(p, at.batch, head, query, column);
      }
    }
    return sum;
  }

  // Whether a NaN in the row may come from a pair that it does not see.
  __device__ static bool may_hide(const StandardFinishParams& p, const Place& at) {
    const EntryKeys<kPair> keys(p.pairs, p.mask, at.batch);
    const core::Mask32 mask = mask_of(p.mask, keys.count);
    return !keys.lost && (kPair.hides() || keys.count < p.mask.seqlen_k || mask.ends() || mask.begins());
  }

  __device__ static void compute_again(const StandardFinishParams& p, const Place& at, int lane) {
    Bits<Element>* out = static_cast<Bits<Element>*>(p.out) + at.in(p.out_strides);
#pragma unroll 1
    for (int column = lane; column < p.width; column += 32) {
      const float sum = Spec::kQueries ? column_of_query(p, at, column) : column_of_key(p, at, column);
      out[column] = narrowed<Element>(p.factor * sum);
    }
  }

 public:
  __device__ static void run(const StandardFinishParams& p) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const long long warp = (static_cast<long long>(blockIdx.x) * Spec::kThreads + threadIdx.x) / 32;
    const int rows_of_warp = 32 / p.lanes;
    const long long first = warp * rows_of_warp, mine = first + lane / p.lanes;
    if (first >= p.rows) return;
    bool nan = p.all != 0;
    if (mine < p.rows && !nan) {
      const Place at(p, mine);
      Bits<Element>* out = static_cast<Bits<Element>*>(p.out) + at.in(p.out_strides);
      const int seqlen = Spec::kQueries ? p.mask.seqlen_q : p.mask.seqlen_k;
      const float* sums = p.sums ? p.sums + ((at.batch * seqlen + at.index) * p.heads + at.head) * p.width : nullptr;
      for (int column = lane % p.lanes * kWidth; column < p.width; column += p.lanes * kWidth) {
        float x[kWidth];
        if (sums) {
#pragma unroll
          for (int e = 0; e < kWidth; ++e) x[e] = column + e < p.width ? sums[column + e] : 0.0f;
          store_unit<Element, Spec::kAligned>(out, column, p.width, x);
        } else {
          load_unit<Element, Spec::kAligned>(out, column, p.width, x);
        }
#pragma unroll
        for (int e = 0; e < kWidth; ++e) nan = nan || x[e] != x[e];
      }
    }
    const bool again = nan && mine < p.rows && (p.all != 0 || may_hide(p, Place(p, mine)));
    if (ptx::vote_all(!again)) return;
#pragma unroll 1
    for (int row = 0; row < rows_of_warp; ++row) {
      bool wanted = false;
      for (int l = 0; l < p.lanes; ++l) wanted = wanted || ptx::shfl(static_cast<unsigned>(again), row * p.lanes + l) != 0;
      if (wanted) compute_again(p, Place(p, first + row), lane);
    }
  }
};

template <class Spec>
__device__ __forceinline__ void finish_rows(const StandardFinishParams& p) {
  FinishRows<Spec>::run(p);
}

}  // namespace fattn::standard
