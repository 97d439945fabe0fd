// Algorithm standard: p = softmax(s) in place, row by row, and lse. Memory is read once and written once where a row fits into the registers of its
// threads; longer rows are read twice. Scores that mask or window hide are not read. With dropout the weights are what it leaves of them.
//
// Spec: Element, kAligned (rows begin at multiples of 16 bytes), kCapped, kRowThreads (32, or those of the CTA), kUnits (of 16 bytes that a thread
// holds; 0: long rows), kThreads, and kPair (kernels/pair.h) with features of pairs.
#pragma once

#include "kernels/constants.h"
#include "kernels/standard/row.h"

namespace fattn::standard {

template <class Spec>
class SoftmaxRows {
  using Element = typename Spec::Element;
  using Row = RowThreads<Spec::kRowThreads>;
  using Pairs = RowPairs<Spec>;
  static constexpr int kWidth = kUnit<Element>, kRowThreads = Spec::kRowThreads;
  static constexpr PairFeatures kPair = kPairOf<Spec>;

  // The finished scores of a unit, -inf where hidden. False: the row sees none of it.
  __device__ static bool load(const StandardRowsParams& p, const RowPlace& at, const Pairs& pairs, const Bits<Element>* row, int first,
                              float (&s)[kWidth]) {
    const bool seen = first < at.end && first + kWidth > at.begin;
    if (seen) load_unit<Element, Spec::kAligned>(row, first, p.mask.seqlen_k, s);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      const bool visible = seen && first + e >= at.begin && first + e < at.end;
      s[e] = visible ? pairs.with_terms(finished_score<Spec>(p, s[e]), first + e) : -kInfinity;
    }
    return seen;
  }

  // What the weights are multiplied with, and lse. A row that sees nothing, or scores of -inf only, has weights of 0; with dropout of -0, which tells
  // it from a row of which nothing stays (kernels/standard/finish.h).
  __device__ static float finish(const StandardRowsParams& p, const RowPlace& at, int thread, float reference, float sum) {
    if (at.lost) sum = __uint_as_float(0x7fffffffu);
    if constexpr (kPair.sinks) {
      const SinkedRow<> sinked(sink_of(p.pairs, at.head), -reference * kLog2e, sum, sum == 0);
      if (thread == 0 && p.lse) p.lse[at.in(p.lse_strides)] = sinked.lse;
      if (sum != 0) return 1.0f / sinked.sum;
    } else if (thread == 0 && p.lse) {
      p.lse[at.in(p.lse_strides)] = sum == 0 ? -kInfinity : reference + logf(sum);
    }
    return sum == 0 ? kPair.dropout ? -0.0f : 0.0f : 1.0f / sum;
  }
  // -inf would make NaN of the scores that are so, too.
  __device__ static float reference_of(float greatest) { return greatest == -kInfinity ? 0.0f : greatest; }

  __device__ static void short_row(const StandardRowsParams& p, const RowPlace& at, const Pairs& pairs, Bits<Element>* row, int thread,
                                   float* shared) {
    float s[Spec::kUnits][kWidth];
    float greatest = -kInfinity;
#pragma unroll
    for (int u = 0; u < Spec::kUnits; ++u) {
      load(p, at, pairs, row, (u * kRowThreads + thread) * kWidth, s[u]);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) greatest = fmaxf(greatest, s[u][e]);
    }
    const float reference = reference_of(Row::greatest(greatest, shared));
    float sum = 0;
#pragma unroll
    for (int u = 0; u < Spec::kUnits; ++u)
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sum += s[u][e] = exponential<Element>(s[u][e] - reference);
    const float factor = finish(p, at, thread, reference, Row::sum(sum, shared));
#pragma unroll
    for (int u = 0; u < Spec::kUnits; ++u) {
      const int first = (u * kRowThreads + thread) * kWidth;
      const unsigned kept = pairs.kept(first);
      if (first >= p.mask.seqlen_k) continue;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) s[u][e] *= factor * kept_scale<Spec>(p, kept, e);
      store_unit<Element, Spec::kAligned>(row, first, p.mask.seqlen_k, s[u]);
    }
  }

  // Every thread keeps a maximum and a sum of its own; they meet at the end.
  __device__ static void long_row(const StandardRowsParams& p, const RowPlace& at, const Pairs& pairs, Bits<Element>* row, int thread,
                                  float* shared) {
    float s[kWidth];
    float greatest = -kInfinity, sum = 0;
    const int begin = at.begin / kWidth * kWidth;
#pragma unroll(kPair.any() ? 1 : 4)
    for (int first = begin + thread * kWidth; first < at.end; first += kRowThreads * kWidth) {
      load(p, at, pairs, row, first, s);
      float raised = greatest;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) raised = fmaxf(raised, s[e]);
      const float reference = reference_of(raised);
      if (raised != greatest) sum = greatest == -kInfinity ? sum : sum * exponential<Element>(greatest - reference);
      greatest = raised;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sum += exponential<Element>(s[e] - reference);
    }
    const float reference = reference_of(Row::greatest(greatest, shared));
    if (greatest != -kInfinity) sum *= exponential<Element>(greatest - reference);
    const float factor = finish(p, at, thread, reference, Row::sum(sum, shared));
#pragma unroll(kPair.any() ? 1 : 4)
    for (int unit = 0; unit < p.mask.seqlen_k; unit += kRowThreads * kWidth) {
      const int first = unit + thread * kWidth;
      const unsigned kept = pairs.kept(first);
      if (first >= p.mask.seqlen_k) continue;
      load(p, at, pairs, row, first, s);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) s[e] = exponential<Element>(s[e] - reference) * (factor * kept_scale<Spec>(p, kept, e));
      store_unit<Element, Spec::kAligned>(row, first, p.mask.seqlen_k, s);
    }
  }

 public:
  __device__ static void run(const StandardRowsParams& p) {
    __shared__ float shared[32];
    const int thread = static_cast<int>(threadIdx.x) % kRowThreads;
    const long long number = static_cast<long long>(blockIdx.x) * (Spec::kThreads / kRowThreads) + threadIdx.x / kRowThreads;
    if (number >= p.rows) return;  // all threads of a row together
    const RowPlace at = RowPlace::of<kPair>(p, number);
    const Pairs pairs(p, at);
    Bits<Element>* row = static_cast<Bits<Element>*>(p.weights.data) + at.in(p.weights.strides);
    if constexpr (Spec::kUnits > 0)
      short_row(p, at, pairs, row, thread, shared);
    else
      long_row(p, at, pairs, row, thread, shared);
  }
};

template <class Spec>
__device__ __forceinline__ void softmax_rows(const StandardRowsParams& p) {
  SoftmaxRows<Spec>::run(p);
}

}  // namespace fattn::standard
