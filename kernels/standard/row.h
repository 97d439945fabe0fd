// Which row of the matrices a thread works on, with which others, and what they sum up together.
#pragma once

#include "device_abi/attention_params.h"
#include "device_abi/mask.h"
#include "device_abi/standard_params.h"
#include "kernels/pair.h"
#include "kernels/ptx/math.h"
#include "kernels/ptx/warp.h"
#include "kernels/standard/element_unit.h"

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

// Of a batch entry that has the first `keys` of the keys.
__device__ __forceinline__ core::Mask32 mask_of(const StandardMask& m, int keys) {
  return {m.seqlen_q, keys, m.causal != 0, m.window_left, m.window_right};
}

// How many keys a batch entry has, and whether it is lost: its length is out of range, and what it gets is NaN.
template <PairFeatures kPair>
struct EntryKeys {
  int count;
  bool lost = false;

  __device__ EntryKeys(const PairParams& pairs, const StandardMask& mask, [[maybe_unused]] long long batch) : count(mask.seqlen_k) {
    if constexpr (kPair.lengths) {
      const int given = given_length(pairs, static_cast<int>(batch));
      lost = given < 0;
      count = max(given, 0);
    }
  }
};

// A row's place: query `query` of head `head` of batch entry `batch`, and the keys [begin, end) of its entry's `keys` that mask and window leave it.
struct RowPlace {
  long long batch;
  int head, query, begin, end, keys;
  bool lost;  // as EntryKeys

  template <PairFeatures kPair>
  __device__ static RowPlace of(const StandardRowsParams& p, long long row) {
    RowPlace at;
    at.query = static_cast<int>(row % p.mask.seqlen_q);
    const long long heads = row / p.mask.seqlen_q;
    at.head = static_cast<int>(heads % p.nheads);
    at.batch = heads / p.nheads;
    const EntryKeys<kPair> keys(p.pairs, p.mask, at.batch);
    at.keys = keys.count;
    at.lost = keys.lost;
    const core::Mask32 mask = mask_of(p.mask, at.keys);
    at.begin = mask.visible_begin(at.query);
    at.end = mask.visible_end(at.query);
    return at;
  }
  __device__ long long in(const StandardStrides& s) const { return batch * s.batch + head * s.head + query * s.row; }
};

// What the scores of a row have beside the product, and which of its weights stay. Without features of pairs: nothing.
template <class Spec>
class RowPairs {
  using Element = typename Spec::Element;
  static constexpr PairFeatures kPair = kPairOf<Spec>;
  static constexpr int kWidth = kUnit<Element>;

  Terms<kPair, BiasElement<Element>> terms_;
  Dropout<kPair> dropout_;
  int query_;

 public:
  __device__ RowPairs(const StandardRowsParams& p, const RowPlace& at)
      : terms_(p.pairs, static_cast<int>(at.batch), at.head, at.keys), dropout_(p.pairs, static_cast<int>(at.batch), at.head), query_(at.query) {}

  // A sum as a matrix of the tensors' dtype keeps it, but one that is beyond its finite numbers and no Inf is the last of them: a finite bias that is
  // meant to hide leaves a row of such keys its weights.
  __device__ static float kept_sum(float sum) {
    const float x = rounded<Element>(sum), most = greatest_finite<Element>();
    return fabsf(sum) < kInfinity ? fminf(fmaxf(x, -most), most) : x;
  }

  // Of a key that mask and window leave: the score with its terms, each added as a matrix of the tensors' dtype is; -inf where one hides the pair.
  __device__ float with_terms(float score, [[maybe_unused]] int key) const {
    if constexpr (kPair.alibi) {
      const float distance = fabsf(static_cast<float>(query_ + terms_.shift - key));
      score = kept_sum(score - kept_sum(terms_.natural_slope * distance));
    }
    if constexpr (kPair.hides()) {
      const float term = terms_.natural(query_, key);
      score = term == -kInfinity ? -kInfinity : kept_sum(score + term);
    }
    return score;
  }
  __device__ bool sees([[maybe_unused]] int key) const {
    if constexpr (kPair.hides()) return terms_.sees(query_, key);
    return true;
  }

  // Bit e: whether the weight of key first + e stays. Four calls of the generator are for the keys of a block; each of the lanes that have units of
  // it makes one. All lanes of a warp together, with the units of neighbours, the first of which begins a block.
  __device__ unsigned kept([[maybe_unused]] int first) const {
    if constexpr (!kPair.dropout) return ~0u;
    constexpr int kLanes = core::kDropoutBlock / kWidth;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const unsigned own =
        dropout_.kept(static_cast<int>(core::dropout_query(static_cast<unsigned>(query_))), first / core::kDropoutBlock, lane % core::kDropoutCalls);
    const int bit = core::dropout_bit(query_, first);
    unsigned bits = 0;
#pragma unroll
    for (int call = 0; call < core::kDropoutCalls; ++call) {  // the keys 2 call and 2 call + 1 of eight
      const unsigned word = ptx::shfl(own, lane / kLanes * kLanes + call) >> bit, two = (word & 1u) | (word >> 15 & 2u);
      if (kWidth == 8 || call / 2 == first % 8 / 4) bits |= two << 2 * call % kWidth;
    }
    return bits;
  }
};

// Whether a unit's element stays, and what its weight is multiplied by.
template <class Spec>
__device__ __forceinline__ float kept_scale(const StandardRowsParams& p, [[maybe_unused]] unsigned kept, [[maybe_unused]] int e) {
  if constexpr (kPairOf<Spec>.dropout) return (kept >> e & 1u) != 0 ? p.pairs.dropout_scale : 0.0f;
  return 1.0f;
}

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
