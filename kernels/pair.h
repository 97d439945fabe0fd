// What depends on a pair (query, key) or on a batch entry: lengths, terms of the score, dropout. Each is a member of PairFeatures, and nothing of it
// is in a specialisation without it. Functions of a lane's own pairs: what a thread holds of a tile of scores is the business of who calls them.
#pragma once

#include "device_abi/attention_params.h"
#include "device_abi/dropout.h"
#include "device_abi/lowest.h"
#include "kernels/constants.h"
#include "kernels/mask.h"
#include "kernels/ptx/convert.h"
#include "kernels/ptx/global_memory.h"
#include "kernels/ptx/half_words.h"
#include "kernels/ptx/math.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/ptx/warp.h"

namespace fattn {

template <class Spec>
constexpr PairFeatures pair_features() {
  if constexpr (requires { Spec::kPair; })
    return Spec::kPair;
  else
    return {};
}
template <class Spec>
inline constexpr PairFeatures kPairOf = pair_features<Spec>();

__device__ __forceinline__ const PairParams& pairs_of(const AttentionParams& p) { return static_cast<const PairParams&>(p); }

// ---- Lengths --------------------------------------------------------------------------------------------------------

// How many keys a batch entry has; -1 if what memory says is out of range: nothing is then read, and what the entry gets is NaN.
__device__ __forceinline__ int given_length(const AttentionParams& p, int batch) {
  const int keys = pairs_of(p).lengths[batch * pairs_of(p).length_stride];
  return 0 <= keys && keys <= p.seqlen_k ? keys : -1;
}

template <PairFeatures kPair>
__device__ __forceinline__ int keys_of(const AttentionParams& p, int batch) {
  if constexpr (kPair.lengths && !kPair.paged) return max(given_length(p, batch), 0);
  return p.seqlen_k;
}

// The mask of a specialisation with windows, for an entry that has `seqlen_k` keys.
template <PairFeatures kPair>
__device__ __forceinline__ core::Mask32 window_mask_of(const AttentionParams& p, [[maybe_unused]] int seqlen_k) {
  if constexpr (kPair.lengths)
    return window_mask(p, seqlen_k);
  else
    return window_mask(p);
}

// What is added to the sums of weights: NaN in a batch entry whose length is out of range. With pages sums begin with it (kernels/pages.h).
template <PairFeatures kPair>
__device__ __forceinline__ float first_sum(const AttentionParams& p, int batch) {
  if constexpr (kPair.lengths && !kPair.paged) return given_length(p, batch) < 0 ? __uint_as_float(0x7fffffffu) : 0.0f;
  return 0.0f;
}

// ---- Sinks ----------------------------------------------------------------------------------------------------------

// A row at its end: what o is divided by, and lse. `shift` is minus the row's reference in units of log2, by which its weights are
// exp2(score + shift); `sum` their sum, 0 if the row is empty.
// kQuick: by a logarithm without a slow path.
template <bool kQuick = false>
struct SinkedRow {
  static constexpr float kGreatest = 120;  // from this exponent on the sink is all that counts; o stays NaN where it is
  float sum, lse;

  __device__ __forceinline__ SinkedRow(float sink, float shift, float weights, bool empty)
      : SinkedRow(sink, fmaf(sink, kLog2e, shift), shift, weights, empty) {}
  // `exponent`: of the sink's weight.
  __device__ __forceinline__ SinkedRow(float sink, float exponent, float shift, float weights, bool empty) {
    sum = empty ? weights : weights + ptx::ex2(exponent > kGreatest ? kGreatest : exponent);
    constexpr float kLn2 = 0.693147180559945309f;
    lse = empty || (exponent > kGreatest && weights == weights) ? sink : kQuick ? (ptx::lg2(sum) - shift) * kLn2 : fmaf(-shift, kLn2, logf(sum));
  }
};
// The exponent of a sink's weight in fp32, made as those of the keys are: with scores of thousands the last places of another product with log2(e)
// are much. kMade: scores are in units of log2, by log2(e).
template <bool kMade>
__device__ __forceinline__ float sink_exponent(const AttentionParams& p, float sink, float shift) {
  const bool alike = !kMade && p.softmax_scale != 0;
  return alike ? fmaf(sink / fabsf(p.softmax_scale), p.softmax_scale_log2, shift) : fmaf(sink, kLog2e, shift);
}
__device__ __forceinline__ float sink_of(const PairParams& p, int head) { return p.sinks[head * p.sinks_stride]; }

// ---- The gradient of lse ---------------------------------------------------------------------------------------------

// That of a row; 0 where it has no gradient, whatever is there.
__device__ __forceinline__ float dlse_of_row(const AttentionParams& p, int batch, int head, long long row) {
  if (p.lse[batch * p.lse_strides.batch + head * p.lse_strides.head + row * p.lse_strides.row] < kLowestLse) return 0;
  const TensorStrides& s = pairs_of(p).dlse_strides;
  return pairs_of(p).dlse[batch * s.batch + head * s.head + row * s.row];
}

// ---- Terms ----------------------------------------------------------------------------------------------------------

// What is added to the scores of one head, in units of log2. -Inf hides a pair, whatever its score.
template <PairFeatures kPair, class Element>
struct Terms {
  float slope, natural_slope;  // the first times log2(e)
  int shift;                   // query i is aligned with key i + shift
  const void* bias;
  const unsigned char* mask;
  long long bias_row, mask_row;
  const int *document_q, *document_k;

  __device__ __forceinline__ Terms(const AttentionParams& params, int batch, int head, int seqlen_k) {
    [[maybe_unused]] const PairParams& p = pairs_of(params);
    if constexpr (kPair.alibi) {
      natural_slope = p.alibi_slopes[batch * p.alibi_batch_stride + head * p.alibi_head_stride];
      slope = natural_slope * kLog2e;
      shift = seqlen_k - p.seqlen_q;
    }
    if constexpr (kPair.bias != 0) {
      bias = static_cast<const char*>(p.bias) + (batch * p.bias_strides.batch + head * p.bias_strides.head) * kBiasBytes;
      bias_row = p.bias_strides.row;
    }
    if constexpr (kPair.mask) {
      mask = p.pair_mask + batch * p.pair_mask_strides.batch + head * p.pair_mask_strides.head;
      mask_row = p.pair_mask_strides.row;
    }
    if constexpr (kPair.documents) {
      document_q = p.document_q + batch * p.document_q_stride;
      document_k = p.document_k + batch * p.document_k_stride;
    }
  }

  // Of a pair that exists: query below seqlen_q, key below seqlen_k.
  __device__ __forceinline__ float operator()(int query, int key) const {
    float term = 0;
    if constexpr (kPair.alibi) term = -slope * fabsf(static_cast<float>(query + shift - key));
    if constexpr (kPair.bias != 0) {
      const float bias = bias_of(query, key);
      term = kPair.alibi ? fmaf(bias, kLog2e, term) : bias * kLog2e;
      if (bias <= kLowestBias) term = bias == -kInfinity ? bias : kLowestBias * kLog2e;
    }
    if constexpr (kPair.mask) term = mask[query * mask_row + key] == 0 ? -kInfinity : term;
    if constexpr (kPair.documents) term = document_q[query] != document_k[key] ? -kInfinity : term;
    return term;
  }
  // Of such a pair, in units of scores and without ALiBi.
  __device__ __forceinline__ float natural(int query, int key) const {
    float term = 0;
    if constexpr (kPair.bias != 0) term = bias_of(query, key);
    if constexpr (kPair.mask) term = mask[query * mask_row + key] == 0 ? -kInfinity : term;
    if constexpr (kPair.documents) term = document_q[query] != document_k[key] ? -kInfinity : term;
    return term;
  }
  // Does neither bias nor mask nor its documents hide it?
  __device__ __forceinline__ bool sees(int query, int key) const {
    if constexpr (kPair.mask)
      if (mask[query * mask_row + key] == 0) return false;
    if constexpr (kPair.documents)
      if (document_q[query] != document_k[key]) return false;
    if constexpr (kPair.bias != 0) return bias_of(query, key) != -kInfinity;
    return true;
  }

 private:
  static constexpr int kBiasBytes = kPair.bias == 2 ? 4 : 2;
  __device__ __forceinline__ float bias_of(int query, int key) const {
    const long long at = query * bias_row + key;
    if constexpr (kPair.bias == 2) return static_cast<const float*>(bias)[at];
    return ptx::to_float<Element>(static_cast<const unsigned short*>(bias)[at]);
  }
};

// A score in units of log2 with its term; kHides: the term may be -Inf, or so low that it takes the score's place.
template <bool kHides>
__device__ __forceinline__ float with_term(float score, float scale, float term) {
  const float sum = fmaf(score, scale, term);
  return kHides && term <= kLowestBias * kLog2e ? term : sum;
}

// A term in units of scores, in the place of the score that has it, where it is so low; else `score`.
__device__ __forceinline__ float or_lowest(float score, float term) {
  return term <= kLowestBias ? (term == -kInfinity ? term : kLowestBias) : score;
}

// ---- Dropout --------------------------------------------------------------------------------------------------------

// Where a part of a matrix begins in the whole one, of which `places` has the random numbers: what is added to a query's number among pairs
// (core::dropout_query) and to a call's among those of all keys. Read where it is wanted, as registers for it would spill.
template <PairFeatures kPair>
struct DropoutPlace {
  const unsigned long long* state;

  __device__ __forceinline__ explicit DropoutPlace([[maybe_unused]] const AttentionParams& params) {
    if constexpr (kPair.places) state = pairs_of(params).dropout_state;
  }
  __device__ __forceinline__ unsigned queries() const {
    if constexpr (kPair.places) return core::dropout_query(ptx::ld_again(state + 2));
    return 0;
  }
  __device__ __forceinline__ unsigned blocks() const {
    if constexpr (kPair.places) return ptx::ld_again(state + 3) / core::kDropoutBlock;
    return 0;
  }
};

// The random numbers of one head.
template <PairFeatures kPair>
struct Dropout {
  unsigned long long seed, stream;
  unsigned below;
  DropoutPlace<kPair> place;

  __device__ __forceinline__ Dropout(const AttentionParams& params, int batch, int head) : place(params) {
    if constexpr (kPair.dropout) {
      const PairParams& p = pairs_of(params);
      seed = p.dropout_state[0];
      stream = p.dropout_state[1] + static_cast<unsigned long long>(batch) * static_cast<unsigned>(p.nheads) + static_cast<unsigned>(head);
      below = p.dropout_below;
    }
  }

  // Which pairs stay of query pair `query` (core::dropout_query) and the keys 2 call, 2 call + 1, 2 call + 8, ... of a block of 64.
  __device__ __forceinline__ unsigned kept(int query, int block, int call) const {
    // Where many features meet, uniform registers leave too few others: spills of 4 to 24 bytes. (Which of these help was found by trying.)
    constexpr bool kOwnStream = kPair.packed && kPair.dbias;
    constexpr bool kOwnThresholds = kPair.packed && (kPair.dbias ? kPair.documents : kPair.lengths);
    const unsigned lanes_own = kOwnStream ? ptx::zero_of_lane() : 0;
    core::Philox4 planes = core::dropout_planes(seed, stream + lanes_own, static_cast<unsigned>(query) + place.queries(),
                                                static_cast<unsigned>(block) + place.blocks(), static_cast<unsigned>(call));
    unsigned thresholds[core::kDropoutBits];
#pragma unroll
    for (int bit = 0; bit < core::kDropoutBits; ++bit) thresholds[bit] = core::dropout_threshold(kOwnThresholds ? ptx::opaque(below) : below, bit);
    const unsigned low = core::dropout_turned(core::dropout_byte(planes, thresholds, 0, 0, ~0u), core::kDropoutLowTurn);
    for (unsigned& word : planes.word) word = ptx::opaque(word);  // what is mixed is mixed again
    return core::dropout_byte(planes, thresholds, 8, core::kDropoutTurn, low);
  }
  // The same of the lane's row `row` of 16, and of row + 8; row % 16 < 8. `key`: the first of the lane's in the block.
  __device__ __forceinline__ unsigned kept_of_rows(int row, int key) const {
    return kept(static_cast<int>(core::dropout_query(static_cast<unsigned>(row))), key / core::kDropoutBlock, key % 8 / 2);
  }
  // Where keys are rows of an accumulator, with lane / 4 or 8 more the lane's in a tile of 16, and queries its columns: of the queries `query` (even,
  // query % 16 < 8) and query + 8 in the low half, of the queries behind them in the high half, in the order of core::dropout_bit(). All lanes of a
  // warp together.
  __device__ __forceinline__ unsigned kept_transposed(int query, int block, int lane) const {
    const int odd = lane / 4 % 2;
    const unsigned own = kept(static_cast<int>(core::dropout_query(static_cast<unsigned>(query))) + odd, block, lane / 8);
    return core::dropout_joined(own, ptx::shfl_xor(own, 4), odd != 0);
  }

  // Whether the weight of one pair stays, by core::dropout_number() of rounds that are not unrolled: for ways that are seldom gone.
  __device__ __forceinline__ bool keeps(int query, int key) const {
    unsigned k0 = static_cast<unsigned>(seed), k1 = static_cast<unsigned>(seed >> 32);
    const unsigned block = static_cast<unsigned>(key / core::kDropoutBlock) + place.blocks();
    core::Philox4 c = {{static_cast<unsigned>(stream), core::dropout_query(static_cast<unsigned>(query)) + place.queries(),
                        block * core::kDropoutCalls + static_cast<unsigned>(key % 8 / 2), static_cast<unsigned>(stream >> 32)}};
#pragma unroll 1
    for (int round = 0; round < core::kPhiloxRounds; ++round) {
      const uint2 a = ptx::mul_wide(core::kPhiloxM0, c.word[0]), b = ptx::mul_wide(core::kPhiloxM1, c.word[2]);
      c = {{b.y ^ c.word[1] ^ k0, b.x, a.y ^ c.word[3] ^ k1, a.x}};
      k0 += core::kPhiloxW0;
      k1 += core::kPhiloxW1;
    }
    return core::dropout_number(c, query % 16 / 8 * 8 + key % core::kDropoutBlock / 8 + key % 2 * 16) >= below;
  }
};

// All ones in the halves of a word that stay, of the pairs with the bits 8 half + n (the low half) and 16 more.
__device__ __forceinline__ unsigned kept_halves(unsigned kept, int half, int n) {
  const unsigned first = kept << (7 - n);
  return half == 0 ? ptx::spread_signs<0, 2>(first) : ptx::spread_signs<1, 3>(first);
}

}  // namespace fattn
