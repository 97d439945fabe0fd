// Algorithm standard, backward: of scores s and dP = dout v^T the weights p = exp(s - lse) and dS = p (dP - rowsum(o dout)), in place, row by row.
//
// Spec: Element, kAligned, kCapped, kRowThreads and kThreads as in softmax.h.
#pragma once

#include "kernels/constants.h"
#include "kernels/standard/row.h"

namespace fattn::standard {

template <class Spec>
class GradientRows {
  using Element = typename Spec::Element;
  using Row = RowThreads<Spec::kRowThreads>;
  static constexpr int kWidth = kUnit<Element>, kRowThreads = Spec::kRowThreads;

  __device__ static float row_sum(const StandardRowsParams& p, const RowPlace& at, int thread, float* shared) {
    const Bits<Element>* o = static_cast<const Bits<Element>*>(p.o) + at.in(p.o_strides);
    const Bits<Element>* dout = static_cast<const Bits<Element>*>(p.dout) + at.in(p.dout_strides);
    float sum = 0;
    for (int d = thread; d < p.headdim_v; d += kRowThreads) sum += widened<Element>(o[d]) * widened<Element>(dout[d]);
    return Row::sum(sum, shared);
  }

 public:
  __device__ static void run(const StandardRowsParams& p) {
    __shared__ float shared[32];
    const int thread = static_cast<int>(threadIdx.x) % kRowThreads;
    const long long number = static_cast<long long>(blockIdx.x) * (Spec::kThreads / kRowThreads) + threadIdx.x / kRowThreads;
    if (number >= p.rows) return;  // all threads of a row together
    const RowPlace at(p, number);
    Bits<Element>* weights = static_cast<Bits<Element>*>(p.weights.data) + at.in(p.weights.strides);
    Bits<Element>* dscores = static_cast<Bits<Element>*>(p.dscores.data) + at.in(p.dscores.strides);
    const float lse = p.lse[at.in(p.lse_strides)];
    const float delta = row_sum(p, at, thread, shared);
    const int end = lse == -kInfinity ? 0 : at.end;  // of an empty row nothing counts
#pragma unroll 4
    for (int first = thread * kWidth; first < p.mask.seqlen_k; first += kRowThreads * kWidth) {
      float s[kWidth], dp[kWidth];
      const bool seen = first < end && first + kWidth > at.begin;
      if (seen) {
        load_unit<Element, Spec::kAligned>(weights, first, p.mask.seqlen_k, s);
        load_unit<Element, Spec::kAligned>(dscores, first, p.mask.seqlen_k, dp);
      }
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        const bool visible = seen && first + e >= at.begin && first + e < end;
        const float score = finished_score<Spec>(p, s[e]);
        const float weight = rounded<Element>(exponential<Element>(score - lse));
        float ds = weight * (dp[e] - delta);
        if constexpr (Spec::kCapped) ds *= 1.0f - (score / p.softcap) * (score / p.softcap);
        s[e] = visible ? weight : 0.0f;
        dp[e] = visible ? ds * p.after : 0.0f;
      }
      store_unit<Element, Spec::kAligned>(weights, first, p.mask.seqlen_k, s);
      store_unit<Element, Spec::kAligned>(dscores, first, p.mask.seqlen_k, dp);
    }
  }
};

template <class Spec>
__device__ __forceinline__ void gradient_rows(const StandardRowsParams& p) {
  GradientRows<Spec>::run(p);
}

}  // namespace fattn::standard
