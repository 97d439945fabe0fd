// Which row of the matrices a thread works on, with which others, and what they sum up together.
#pragma once

#include "kernels/ptx/math.h"
#include "kernels/ptx/warp.h"
#include "kernels/standard/element_unit.h"
#include "shared/mask.h"
#include "shared/standard_params.h"

namespace fattn::standard {

// The threads of one row: a part of a warp's CTA where kThreads is 32, else the CTA.
template <int kThreads>
struct RowThreads {
  static constexpr int kWarps = kThreads / 32;

  // op over the values of the row's threads; the same in all of them. `shared`: a float a warp, free before and after.
  template <class Op>
  __device__ static float reduce(float x, float* shared, Op op) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x = op(x, ptx::shfl_xor(x, distance));
    if constexpr (kWarps > 1) {
      const int warp = static_cast<int>(threadIdx.x) / 32;
      if (threadIdx.x % 32 == 0) shared[warp] = x;
      __syncthreads();
      x = shared[0];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) x = op(x, shared[w]);
      __syncthreads();
    }
    return x;
  }
  __device__ static float sum(float x, float* shared) {
    return reduce(x, shared, [](float a, float b) { return a + b; });
  }
  __device__ static float greatest(float x, float* shared) {
    return reduce(x, shared, [](float a, float b) { return fmaxf(a, b); });
  }
};

__device__ __forceinline__ core::Mask32 mask_of(const StandardMask& m) {
  return {m.seqlen_q, m.seqlen_k, m.causal != 0, m.window_left, m.window_right};
}

// A row's place: query `query` of head `head` of batch entry `batch`, and the keys [begin, end) that it sees.
struct RowPlace {
  long long batch;
  int head, query, begin, end;

  __device__ RowPlace(const StandardRowsParams& p, long long row) {
    query = static_cast<int>(row % p.mask.seqlen_q);
    const long long heads = row / p.mask.seqlen_q;
    head = static_cast<int>(heads % p.nheads);
    batch = heads / p.nheads;
    const core::Mask32 mask = mask_of(p.mask);
    begin = mask.visible_begin(query);
    end = mask.visible_end(query);
  }
  __device__ long long in(const StandardStrides& s) const { return batch * s.batch + head * s.head + query * s.row; }
};

// e^x. In fp32 to its last places; for 16 bits those of ex2 are more than enough.
template <class Element>
__device__ __forceinline__ float exponential(float x) {
  if constexpr (is_wide<Element>)
    return expf(x);
  else
    return ptx::ex2(x * 1.4426950408889634f);
}

// A score as the product left it, with what is left of the scale and the cap.
template <class Spec>
__device__ __forceinline__ float finished_score(const StandardRowsParams& p, float s) {
  s *= p.after;
  if constexpr (Spec::kCapped) s = p.softcap * tanhf(s / p.softcap);
  return s;
}

}  // namespace fattn::standard
