// What a warp of v2's forward pass (kernels/v2/forward.h) keeps in registers from block to block, and what features of pairs a step has.
#pragma once

#include "device_abi/attention_params.h"
#include "kernels/constants.h"
#include "kernels/pair.h"
#include "kernels/ptx/warp.h"
#include "kernels/score.h"
#include "kernels/softmax.h"
#include "kernels/v2/forward_shape.h"
#include "kernels/v2/term_tile.h"

namespace fattn::v2 {

// What a warp keeps in registers from block to block.
template <class Spec>
struct WarpState {
  static constexpr int kRowTiles = Spec::kRowTiles;
  static constexpr int kDepthQ = (Spec::kHeaddim + 15) / 16;   // steps of 16 along headdim
  static constexpr int kDepthO = (Spec::kHeaddimV + 15) / 16;  // pairs of output tiles of 8 columns

  float o[kRowTiles][2 * kDepthO][4];
  Softmax<kRowTiles> softmax;
  unsigned q[Spec::kQueriesInRegisters ? kDepthQ : 1][kRowTiles][4];
  unsigned q_address, k_address, v_address;  // of this lane, in the queries and in stage 0
  // Of scores: in units of log2, or, where terms may hide, the number that they have in the backward pass. By log2(e) and back scores in the
  // thousands would move by a thousandth, which dv sees.
  static constexpr bool kNaturalScale = kPairOf<Spec>.hides() && !Spec::kCapped;
  float scale;
  float score_factor;
  float rest;  // Rest::packed() of the last references that were raised, until sums and o have it back
  // With dropout: which pairs stay, of block kept_of of its random numbers, which may be several steps.
  unsigned kept[kRowTiles];
  int kept_of;
  // With terms from shared memory: a row has no reference yet, or that of the lowest biases, beside which scores and terms are made exactly.
  bool low;

  __device__ __forceinline__ void start(const AttentionParams& p) {
    scale = kNaturalScale ? fabsf(p.softmax_scale) : p.softmax_scale_log2;
    if constexpr (Spec::kCapped) score_factor = features_of(p).score_factor;
    if constexpr (kPairOf<Spec>.dropout) kept_of = -1;
    if constexpr (kPairOf<Spec>.hides()) low = true;
    softmax.start();
    rest = 0;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int n = 0; n < 2 * kDepthO; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[i][n][e] = 0;
      }
    }
  }

  // Before weights of other keys than those whose references were raised are added.
  __device__ __forceinline__ void give_back() {
    if (ptx::vote_all(rest == 0)) return;
    softmax.give_back(rest, o);
    rest = 0;
  }
};

// Features of pairs in one step: this lane's first query and first key, and what there is of both. Empty without such features.
template <class Spec, bool kAny = kPairOf<Spec>.any()>
struct StepPairs {};
template <class Spec>
struct StepPairs<Spec, true> {
  static constexpr PairFeatures kPair = kPairOf<Spec>;
  using Shape = ForwardShape<Spec>;
  using Reader = TermReader<kPair, typename Spec::Element, Shape::kTerms>;
  const Terms<kPair, typename Spec::Element>& terms;
  const Dropout<kPair>& dropout;
  const Reader& reader;
  int row, key, seqlen_q, seqlen_k;
  float ahead;  // of ALiBi in a block that all rows see: -1 if no key is behind its query, 1 if none is before it

  // What is added to the scores of row tile i and 16 keys, but for ALiBi. Rows behind the last, and in a block with kExact keys, get what another one
  // has, or something finite.
  template <bool kExact>
  __device__ __forceinline__ void read(float (&term)[2][4], int i, int chunk) const {
    if constexpr (Shape::kStaged) {
      reader.read(term, i, chunk);
      if constexpr (kPair.documents) {
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (terms.document_q[query_of(i, e / 2)] != terms.document_k[key_of<kExact>(2 * chunk + n, e % 2)]) term[n][e] = -kInfinity;
      }
    } else {
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) term[n][e] = terms.natural(query_of(i, e / 2), key_of<kExact>(2 * chunk + n, e % 2));
    }
  }

 private:
  __device__ __forceinline__ int query_of(int i, int half) const { return min(row + 16 * i + 8 * half, seqlen_q - 1); }
  template <bool kExact>
  __device__ __forceinline__ int key_of(int n, int e) const {
    const int column = key + 8 * n + e;
    return kExact ? min(column, seqlen_k - 1) : column;
  }
};
}  // namespace fattn::v2
