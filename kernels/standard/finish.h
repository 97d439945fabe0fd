// Algorithm standard: rows of an output after its product. Sums over a group of heads get their dtype; Inf and NaN that the product did not meet
// (kernels/standard/clean.h) go to the rows that see them. A CTA asks once whether there are any for its rows, which are of one head. If so a row
// asks once for all of its columns, and as often whatever there is: notes of what it sees, a bit a column, are or-ed.
//
// Spec: Element, kAligned, kQueries (a row is a query: o, dq; else a key: dk, dv), kThreads, and kPair with features that hide pairs.
#pragma once

#include "device_abi/lowest.h"
#include "kernels/constants.h"
#include "kernels/ptx/warp.h"
#include "kernels/standard/row.h"

namespace fattn::standard {

template <class Spec>
class FinishRows {
  using Element = typename Spec::Element;
  static constexpr int kWidth = kUnit<Element>, kWords = 8;  // of 32 columns, at once
  static constexpr PairFeatures kPair = kPairOf<Spec>;
  using HeadTerms = Terms<kPair, BiasElement<Element>>;

  struct Place {
    long long batch;
    int head, index;
    __device__ long long in(const StandardStrides& s) const { return batch * s.batch + head * s.head + index * s.row; }
  };

  // Columns where the row sees NaN or Inf, and NaN or -Inf: of a lane's own, then of all.
  struct Seen {
    unsigned plus[kWords], minus[kWords];
  };

  __device__ static int seqlen_of_other(const StandardFinishParams& p) { return Spec::kQueries ? p.mask.seqlen_k : p.mask.seqlen_q; }

  // Of all threads of the CTA together: whether what the head was multiplied with, of all heads of a group, had any.
  __device__ static bool any_spoilt(const StandardFinishParams& p, long long batch, int head) {
    const int blocks = (seqlen_of_other(p) + kStandardCleanRows - 1) / kStandardCleanRows;
    const long long first = Spec::kQueries ? batch * (p.heads / p.group) + head / p.group : (batch * p.heads + head) * p.group;
    const long long count = static_cast<long long>(Spec::kQueries ? 1 : p.group) * blocks;
    unsigned long long some = 0;
    for (long long i = threadIdx.x; i < count; i += Spec::kThreads) some |= p.spoilt[first * blocks + i];
    return __syncthreads_or(some != 0 ? 1 : 0) != 0;
  }

  __device__ static bool has_gradient(const StandardFinishParams& p, long long batch, int head, int query) {
    const StandardStrides& s = p.lse_strides;
    return !(p.lse[batch * s.batch + head * s.head + query * s.row] < kLowestLse);
  }

  // Of the head `head` of queries: 32 words from `first_word` on, or less. Whether there may be anything.
  __device__ static bool look(const StandardFinishParams& p, const Place& at, int head, int first_word, int lane, Seen& seen) {
    const int keys = EntryKeys<kPair>(p.pairs, p.mask, at.batch).count;
    if (!Spec::kQueries && at.index >= keys) return false;
    const core::Mask32 mask = mask_of(p.mask, keys);
    const int begin = Spec::kQueries ? mask.visible_begin(at.index) : mask.first_row(at.index);
    const int end = Spec::kQueries ? mask.visible_end(at.index) : mask.row_end(at.index);
    const int rows = seqlen_of_other(p), blocks = (rows + kStandardCleanRows - 1) / kStandardCleanRows;
    const long long other = Spec::kQueries ? at.batch * (p.heads / p.group) + head / p.group : at.batch * (p.heads * p.group) + head;
    const unsigned long long* const spoilt = p.spoilt + other * blocks;
    bool any = false;
#pragma unroll 1
    for (int first = begin / kStandardCleanRows; first * kStandardCleanRows < end; first += 32) {
      const unsigned long long own = (first + lane) * kStandardCleanRows < end ? spoilt[first + lane] : 0;
      unsigned some = ptx::ballot(own != 0);
      if (some == 0) continue;
      any = true;
      const HeadTerms terms(p.pairs, static_cast<int>(at.batch), head, keys);
#pragma unroll 1
      for (; some != 0; some &= some - 1) {
        const int from = __ffs(static_cast<int>(some)) - 1;
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
          const unsigned bits = ptx::shfl(static_cast<unsigned>(half == 0 ? own : own >> 32), from);
          const int row = (first + from) * kStandardCleanRows + 32 * half + lane;
          if ((bits >> lane & 1) == 0 || row < begin || row >= end) continue;
          if (!Spec::kQueries && !has_gradient(p, at.batch, head, row)) continue;
          if (kPair.hides() && !(Spec::kQueries ? terms.sees(at.index, row) : terms.sees(row, at.index))) continue;
          const unsigned* const marks = p.marks + (other * rows + row) * (2 * p.words) + first_word;
#pragma unroll
          for (int w = 0; w < kWords; ++w) {
            if (first_word + w >= p.words) break;
            seen.plus[w] |= marks[w];
            seen.minus[w] |= marks[p.words + w];
          }
        }
      }
    }
    return any;
  }

  // Forward: whether a row has a weight; one without, of scores of -inf, is empty. With dropout its weights are -0.
  __device__ static bool weighed(const StandardFinishParams& p, const Place& at, int lane) {
    const StandardStrides& s = p.matrix.strides;
    const Bits<Element>* const row = static_cast<const Bits<Element>*>(p.matrix.data) + at.in(s);
    bool none = true;
#pragma unroll 1
    for (int key = lane; key < p.mask.seqlen_k; key += 32) {
      const float weight = widened<Element>(row[key]);
      none = none && (kPair.dropout ? __float_as_uint(weight) == 0x80000000u : weight == 0);
    }
    return !ptx::vote_all(none);
  }

  // All lanes of a warp together.
  __device__ static void add_seen(const StandardFinishParams& p, const Place& at, int lane) {
    if (Spec::kQueries && p.lse && !has_gradient(p, at.batch, at.head, at.index)) return;
#pragma unroll 1
    for (int first_word = 0; first_word < p.words; first_word += kWords) {
      Seen seen{};
      bool any = false;
      if constexpr (Spec::kQueries) {
        any = look(p, at, at.head, first_word, lane, seen);
      } else {
#pragma unroll 1
        for (int head = at.head * p.group; head < (at.head + 1) * p.group; ++head)
          if (look(p, at, head, first_word, lane, seen)) any = true;
      }
      if (!any) return;
      unsigned all = 0;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
#pragma unroll 1
        for (int lanes = 1; lanes < 32; lanes *= 2) {
          seen.plus[w] |= ptx::shfl_xor(seen.plus[w], lanes);
          seen.minus[w] |= ptx::shfl_xor(seen.minus[w], lanes);
        }
        all |= seen.plus[w] | seen.minus[w];
      }
      if (all == 0) continue;
      if (Spec::kQueries && !p.lse && !weighed(p, at, lane)) return;
      Bits<Element>* const out = static_cast<Bits<Element>*>(p.out) + at.in(p.out_strides);
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const int column = 32 * (first_word + w) + lane;
        const bool plus = (seen.plus[w] >> lane & 1) != 0, minus = (seen.minus[w] >> lane & 1) != 0;
        if ((!plus && !minus) || column >= p.width) continue;
        float x = widened<Element>(out[column]);
        if (plus || p.keeps_sign == 0) x += kInfinity;
        if (minus || p.keeps_sign == 0) x += -kInfinity;
        out[column] = narrowed<Element>(x);
      }
    }
  }

  // From the sums over a group of heads, or without a product: then there is nothing, or NaN if the entry's length is out of range.
  __device__ static void write(const StandardFinishParams& p, const Place& at, int lane) {
    Bits<Element>* out = static_cast<Bits<Element>*>(p.out) + at.in(p.out_strides);
    const int seqlen = Spec::kQueries ? p.mask.seqlen_q : p.mask.seqlen_k;
    const float* sums = p.all == 0 ? p.sums + ((at.batch * seqlen + at.index) * p.heads + at.head) * p.width : nullptr;
    const float none = EntryKeys<kPair>(p.pairs, p.mask, at.batch).lost ? __uint_as_float(0x7fffffffu) : 0.0f;
    for (int column = lane * kWidth; column < p.width; column += p.lanes * kWidth) {
      float x[kWidth];
#pragma unroll
      for (int e = 0; e < kWidth; ++e) x[e] = sums && column + e < p.width ? sums[column + e] : none;
      store_unit<Element, Spec::kAligned>(out, column, p.width, x);
    }
  }

 public:
  __device__ static void run(const StandardFinishParams& p) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int seqlen = Spec::kQueries ? p.mask.seqlen_q : p.mask.seqlen_k, blocks = (seqlen + p.block_rows - 1) / p.block_rows;
#pragma unroll 1
    for (long long block = blockIdx.x; block < p.blocks; block += gridDim.x) {
      const long long head = block / blocks;
      const int begin = static_cast<int>(block % blocks) * p.block_rows, end = begin + min(p.block_rows, seqlen - begin);
      Place at{head / p.heads, static_cast<int>(head % p.heads), 0};
      if (p.sums || p.all != 0) {
        const int rows_of_warp = 32 / p.lanes;
#pragma unroll 1
        for (at.index = begin + warp * rows_of_warp + lane / p.lanes; at.index < end; at.index += Spec::kThreads / 32 * rows_of_warp)
          write(p, at, lane % p.lanes);
      }
      if (!p.spoilt || !any_spoilt(p, at.batch, at.head)) continue;  // behind a barrier: another warp may have written the row
#pragma unroll 1
      for (at.index = begin + warp; at.index < end; at.index += Spec::kThreads / 32) add_seen(p, at, lane);
    }
  }
};

template <class Spec>
__device__ __forceinline__ void finish_rows(const StandardFinishParams& p) {
  FinishRows<Spec>::run(p);
}

}  // namespace fattn::standard
