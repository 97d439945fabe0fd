// Algorithm standard, backward: of scores s and dP = dout v^T the weights p = exp(s - lse) and dS = p (dP - rowsum(o dout)), in place, row by row.
// With dropout the weights are what it leaves of them, and so is dP; dlse is taken off the row sum, and dS is added to dbias.
//
// Spec: Element, kAligned, kCapped, kRowThreads, kThreads and kPair as in softmax.h.
#pragma once

#include "device_abi/lowest.h"
#include "kernels/constants.h"
#include "kernels/ptx/reduce.h"
#include "kernels/standard/row.h"

namespace fattn::standard {

template <class Spec>
class GradientRows {
  using Element = typename Spec::Element;
  using Row = RowThreads<Spec::kRowThreads>;
  static constexpr int kWidth = kUnit<Element>, kRowThreads = Spec::kRowThreads;
  static constexpr PairFeatures kPair = kPairOf<Spec>;

  __device__ static float row_sum(const StandardRowsParams& p, const RowPlace& at, int thread, float* shared) {
    const Bits<Element>* o = static_cast<const Bits<Element>*>(p.o) + at.in(p.o_strides);
    const Bits<Element>* dout = static_cast<const Bits<Element>*>(p.dout) + at.in(p.dout_strides);
    float sum = 0;
    for (int d = thread; d < p.headdim_v; d += kRowThreads) sum += widened<Element>(o[d]) * widened<Element>(dout[d]);
    return Row::sum(sum, shared);
  }

  __device__ static void add_to_dbias(const StandardRowsParams& p, const RowPlace& at, int key, float gradient) {
    const TensorStrides& s = p.pairs.dbias_strides;
    float* const to = p.pairs.dbias + at.batch * s.batch + at.head * s.head + at.query * s.row + key;
    if (p.pairs.dbias_alone != 0)
      *to = gradient;
    else
      ptx::red_add(to, gradient);
  }

 public:
  __device__ static void run(const StandardRowsParams& p) {
    __shared__ float shared[32];
    const int thread = static_cast<int>(threadIdx.x) % kRowThreads;
    const long long number = static_cast<long long>(blockIdx.x) * (Spec::kThreads / kRowThreads) + threadIdx.x / kRowThreads;
    if (number >= p.rows) return;  // all threads of a row together
    const RowPlace at = RowPlace::of<kPair>(p, number);
    const RowPairs<Spec> pairs(p, at);
    Bits<Element>* weights = static_cast<Bits<Element>*>(p.weights.data) + at.in(p.weights.strides);
    Bits<Element>* dscores = static_cast<Bits<Element>*>(p.dscores.data) + at.in(p.dscores.strides);
    const float lse = p.lse[at.in(p.lse_strides)];
    float delta = row_sum(p, at, thread, shared);
    if constexpr (kPair.dlse) {
      const TensorStrides& s = p.pairs.dlse_strides;
      if (!(lse < kLowestLse)) delta -= p.pairs.dlse[at.batch * s.batch + at.head * s.head + at.query * s.row];
    }
    const int end = lse < kLowestLse ? 0 : at.end;  // of a row without a gradient nothing counts
    const float none = at.lost ? __uint_as_float(0x7fffffffu) : 0.0f;
#pragma unroll(kPair.any() ? 1 : 4)
    for (int unit = 0; unit < p.mask.seqlen_k; unit += kRowThreads * kWidth) {
      const int first = unit + thread * kWidth;
      const unsigned kept = pairs.kept(first);
      if (first >= p.mask.seqlen_k) continue;
      float s[kWidth], dp[kWidth];
      const bool seen = first < end && first + kWidth > at.begin;
      if (seen) {
        load_unit<Element, Spec::kAligned>(weights, first, p.mask.seqlen_k, s);
        load_unit<Element, Spec::kAligned>(dscores, first, p.mask.seqlen_k, dp);
      }
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        const bool visible = seen && first + e >= at.begin && first + e < end && pairs.sees(first + e);
        const float score = finished_score<Spec>(p, s[e]), scale = kept_scale<Spec>(p, kept, e);
        const float weight = rounded<Element>(exponential<Element>((visible ? pairs.with_terms(score, first + e) : score) - lse));
        float ds = weight * ((scale == 0 ? 0.0f : dp[e] * scale) - delta);
        if constexpr (kPair.dbias)
          if (visible) add_to_dbias(p, at, first + e, ds);
        if constexpr (Spec::kCapped) ds *= 1.0f - (score / p.softcap) * (score / p.softcap);
        s[e] = !visible ? none : scale == 0 ? 0.0f : weight * scale;
        dp[e] = visible ? ds * p.after : none;
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
