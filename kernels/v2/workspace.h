// Where rows of queries are in the workspace of a backward pass: row sums, dq in fp32, and the turns of a deterministic one.
//
// Batch entry by batch entry, head by head; of packed sequences head by head, all rows of q together. Blocks of rows are whole there too, so a
// sequence may have one more than its rows fill: its first is the one in which its first row would be, plus one for each sequence before it.
#pragma once

#include "device_abi/attention_params.h"
#include "device_abi/backward_layout.h"
#include "kernels/pair.h"
#include "kernels/sequence.h"

namespace fattn::v2 {

// A call's parameters, which a CTA makes its own where sequences are packed.
template <PairFeatures kPair>
struct CallParamsOf {
  using Type = const AttentionParams;
};
template <PairFeatures kPair>
requires(kPair.packed) struct CallParamsOf<kPair> {
  using Type = PairParams;
};
template <PairFeatures kPair>
using CallParams = typename CallParamsOf<kPair>::Type;

// A head's number in the workspace: batch_head, batch * nheads + head, of packed sequences `head`.
template <PairFeatures kPair>
__device__ __forceinline__ long long workspace_head(long long batch_head, [[maybe_unused]] long long head) {
  if constexpr (kPair.packed)
    return head;
  else
    return batch_head;
}

// Blocks of kRows queries that each of these heads has.
template <PairFeatures kPair, int kRows>
__device__ __forceinline__ unsigned workspace_blocks(const AttentionParams& p) {
  if constexpr (kPair.packed)
    return packed_blocks(pairs_of(p).total_q, p.batch, kRows);
  else
    return (static_cast<unsigned>(p.seqlen_q) + kRows - 1) / kRows;
}

// The first row sum of a head.
template <PairFeatures kPair>
__device__ __forceinline__ long long workspace_rows(const AttentionParams& p, long long batch_head, [[maybe_unused]] long long head) {
  if constexpr (kPair.packed)
    return head * pairs_of(p).total_q;
  else
    return batch_head * p.seqlen_q;
}

// The first element of a head's dq_accum; `head_size`: of its own rows.
template <PairFeatures kPair, int kWidth>
__device__ __forceinline__ long long workspace_accum(const AttentionParams& p, long long batch_head, [[maybe_unused]] long long head,
                                                     long long head_size) {
  if constexpr (kPair.packed)
    return head * workspace_blocks<kPair, kDqAccumRows>(p) * (kDqAccumRows * kWidth);
  else
    return batch_head * head_size;
}

// Makes of a call's parameters those of its sequence n, with the workspace. A turn is that of kTurnRows queries.
template <int kWidth, int kTurnRows, class Bits = unsigned short, class Out = Bits>
__device__ __forceinline__ void enter(PairParams& p, int n, const Sequence& at) {
  enter_sequence<Bits, Out>(p, at);
  p.row_sum += at.q.begin;
  p.dq_accum += static_cast<long long>(at.q.begin / kDqAccumRows + n) * (kDqAccumRows * kWidth);
  p.dq_semaphore += at.q.begin / kTurnRows + n;
}
template <PairFeatures kPair, int kWidth, int kTurnRows>
__device__ __forceinline__ void enter(PairParams& p, int n) {
  enter<kWidth, kTurnRows, unsigned short, typename OutputBits<unsigned short, kPair.fp32_out>::Type>(p, n, given_sequence<kPair.lengths>(p, n));
}

// As entry_params(), with the workspace.
template <PairFeatures kPair, int kWidth, int kTurnRows, class Bits = unsigned short>
__device__ __forceinline__ decltype(auto) backward_params(const AttentionParams& call, [[maybe_unused]] long long n) {
  if constexpr (kPair.packed) {
    PairParams own = pairs_of(call);
    using Out = typename OutputBits<Bits, kPair.fp32_out>::Type;
    enter<kWidth, kTurnRows, Bits, Out>(own, static_cast<int>(n), given_sequence<kPair.lengths>(own, static_cast<int>(n)));
    return own;
  } else {
    return (call);
  }
}

}  // namespace fattn::v2
