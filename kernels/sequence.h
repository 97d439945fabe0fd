// Packed sequences: where each lies, as device memory says, and the parameters of a call as if a sequence were all of it. Specialisations without
// PairFeatures::packed have none of this.
#pragma once

#include "device_abi/attention_params.h"
#include "kernels/pair.h"

namespace fattn {

// Rows [begin, begin + count) of a tensor.
struct Rows {
  int begin, count;
};
struct Sequence {
  Rows q, k;
};

// Offsets n and n + 1 of a tensor of `total` rows; -1 rows: they are out of range, or further apart than `most`.
__device__ __forceinline__ Rows given_rows(const int* offsets, long long stride, int n, long long total, int most) {
  const int begin = offsets[n * stride], end = offsets[(n + 1) * stride];
  const bool good = (n > 0 ? begin >= 0 : begin == 0) && begin <= end && end <= total && end - begin <= most;
  return good ? Rows{begin, end - begin} : Rows{0, -1};
}

// How many of its `keys` batch entry n uses; -1 if what memory says is out of range, as given_length() (kernels/pair.h).
__device__ __forceinline__ int used_keys(const int* lengths, long long stride, int n, int keys) {
  const int used = lengths[n * stride];
  return 0 <= used && used <= keys ? used : -1;
}

// The keys of sequence n where `lengths` says how many each uses: only where it begins is asked, so sequences are in any order, with anything
// between.
__device__ __forceinline__ Rows used_rows(const int* offsets, long long stride, const int* lengths, long long length_stride, int n, long long total,
                                          int most) {
  const int begin = offsets[n * stride], used = used_keys(lengths, length_stride, n, most);
  return begin >= 0 && used >= 0 && begin + static_cast<long long>(used) <= total ? Rows{begin, used} : Rows{0, -1};
}

// Sequence n of a call, of specialisations with lengths with the keys alone that it uses. Nothing is read or written of one whose offsets or length
// are out of range: it counts as empty, and kernels/sequence_rest.h fills its rows with NaN.
// kPaged: queries alone are packed, and the keys of each sequence are in pages.
template <bool kLengths, bool kPaged = false>
__device__ __forceinline__ Sequence given_sequence(const PairParams& p, int n) {
  const Rows q = given_rows(p.cu_seqlens_q, p.cu_seqlens_q_stride, n, p.total_q, p.seqlen_q);
  const Rows k = kPaged     ? Rows{0, used_keys(p.lengths, p.length_stride, n, p.seqlen_k)}
                 : kLengths ? used_rows(p.cu_seqlens_k, p.cu_seqlens_k_stride, p.lengths, p.length_stride, n, p.total_k, p.seqlen_k)
                            : given_rows(p.cu_seqlens_k, p.cu_seqlens_k_stride, n, p.total_k, p.seqlen_k);
  return q.count < 0 || k.count < 0 ? Sequence{{0, 0}, {0, 0}} : Sequence{q, k};
}
// The same of kernels that are not specialised for lengths.
__device__ __forceinline__ Sequence given_sequence(const PairParams& p, int n) {
  return p.lengths != nullptr ? given_sequence<true>(p, n) : given_sequence<false>(p, n);
}

// What an element of o, dq, dk and dv is, beside inputs of Bits.
template <class Bits, bool kFp32>
struct OutputBits {
  using Type = Bits;
};
template <class Bits>
struct OutputBits<Bits, true> {
  using Type = float;
};

// Makes of a call's parameters those of its sequence n: tensors begin with its rows, and lengths are its own. Elements of inputs are as large as
// Bits, those of o and of gradients as Out (a backward pass, which reads o, has no use for it there). The workspace is the kernels' own business.
template <class Bits, class Out = Bits>
__device__ __forceinline__ void enter_sequence(PairParams& p, const Sequence& at) {
  const auto forward_to = [](const void* tensor, const TensorStrides& strides, int row) {
    return static_cast<const void*>(static_cast<const Bits*>(tensor) + row * strides.row);
  };
  const auto output_at = [](void* tensor, const TensorStrides& strides, int row) {
    return static_cast<void*>(static_cast<Out*>(tensor) + row * strides.row);
  };
  p.q = forward_to(p.q, p.q_strides, at.q.begin);
  p.k = forward_to(p.k, p.k_strides, at.k.begin);
  p.v = forward_to(p.v, p.v_strides, at.k.begin);
  p.o = output_at(p.o, p.o_strides, at.q.begin);
  if (p.lse != nullptr) p.lse += at.q.begin * p.lse_strides.row;
  p.dout = forward_to(p.dout, p.dout_strides, at.q.begin);
  p.dq = output_at(p.dq, p.dq_strides, at.q.begin);
  p.dk = output_at(p.dk, p.dk_strides, at.k.begin);
  p.dv = output_at(p.dv, p.dv_strides, at.k.begin);
  p.dlse += at.q.begin * p.dlse_strides.row;
  p.document_q += at.q.begin;
  p.document_k += at.k.begin;
  p.seqlen_q = at.q.count;
  p.seqlen_k = at.k.count;
}

// A sequence's parameters, and the call's: for who finds again there what would take registers.
struct OwnParams : PairParams {
  const AttentionParams& call;
};
struct OwnPagedParams : PagedParams {
  const AttentionParams& call;
};

template <bool kPaged>
struct OwnTypes {
  using Params = PairParams;
  using WithCall = OwnParams;
};
template <>
struct OwnTypes<true> {
  using Params = PagedParams;
  using WithCall = OwnPagedParams;
};

// What a CTA that works on batch entry n is told: of packed sequences its own, otherwise the call's parameters themselves.
template <PairFeatures kPair, class Bits = unsigned short>
__device__ __forceinline__ decltype(auto) entry_params(const AttentionParams& call, [[maybe_unused]] int n) {
  if constexpr (kPair.packed) {
    using Params = typename OwnTypes<kPair.paged>::Params;
    Params own = static_cast<const Params&>(call);
    enter_sequence<Bits, typename OutputBits<Bits, kPair.fp32_out>::Type>(own, given_sequence<kPair.lengths, kPair.paged>(own, n));
    return own;
  } else {
    return (call);
  }
}

}  // namespace fattn
