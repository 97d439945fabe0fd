// Inf and NaN in values that a row does not see. Their weight is 0, but 0 * Inf is NaN: such rows are computed again without the hidden keys, one
// after the other from global memory, into the tile of o in shared memory. Seldom used: it has few registers, and time does not matter.
#pragma once

#include "kernels/ptx/convert.h"
#include "kernels/ptx/math.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/warp.h"
#include "kernels/v3/alibi.h"
#include "kernels/v3/forward_shape.h"
#include "kernels/v3/global_rows.h"
#include "kernels/v3/schedule.h"
#include "kernels/v3/softmax.h"

namespace fattn::v3 {

template <class Element>
inline constexpr unsigned kExponentBits = is_same<Element, bf16> ? 0x7f80u : 0x7c00u;
template <class Element>
__device__ __forceinline__ bool is_nan(unsigned short bits) {
  return (bits & 0x7fffu) > kExponentBits<Element>;
}

// Whether one of the keys [begin, end) has a value that is no number. All lanes of a warp together, as below.
template <class Element>
__device__ __forceinline__ bool any_nonfinite(const GlobalRows<Element>& v, int begin, int end, int columns, int lane) {
  bool finite = true;
#pragma unroll 1
  for (int key = begin; key < end; ++key) {
#pragma unroll 1
    for (int column = lane; column < columns; column += 32)
      finite = finite && (v.bits(key, column) & kExponentBits<Element>) != kExponentBits<Element>;
  }
  return !ptx::vote_all(finite);
}

// A tile's rows of q; of k or v.
template <class Element>
__device__ __forceinline__ GlobalRows<Element> queries_at(const void* tensor, const TensorStrides& strides, const Place& place) {
  return rows_of<Element>(tensor, strides, place.batch, place.head);
}
template <class Element>
__device__ __forceinline__ GlobalRows<Element> keys_at(const void* tensor, const TensorStrides& strides, const Place& place) {
  return rows_of<Element>(tensor, strides, place.batch, place.head_k);
}
template <class Element>
__device__ __forceinline__ GlobalRows<Element> queries_at(const void* tensor, const TensorStrides& strides, const PackedPlace& place) {
  return rows_of<Element>(static_cast<const unsigned short*>(tensor) + place.q_begin * strides.row, strides, 0, place.head);
}
template <class Element>
__device__ __forceinline__ GlobalRows<Element> keys_at(const void* tensor, const TensorStrides& strides, const PackedPlace& place) {
  return rows_of<Element>(static_cast<const unsigned short*>(tensor) + place.k_begin * strides.row, strides, 0, place.head_k);
}

// The score of a query and a key, as the softmax takes it. All lanes of a warp together.
template <class Spec>
__device__ __forceinline__ float score_of(const ForwardCall& p, const GlobalRows<typename Spec::Element>& q, int row,
                                          const GlobalRows<typename Spec::Element>& k, int key, int lane) {
  float score[1] = {0};
#pragma unroll 1
  for (int c = lane; c < p.work.columns; c += 32) score[0] = fmaf(q.value(row, c), k.value(key, c), score[0]);
#pragma unroll 1
  for (int lanes = 1; lanes < 32; lanes *= 2) score[0] += ptx::shfl_xor(score[0], lanes);
  Spec::Score::apply(score, p.call);
  return score[0] * p.call.softmax_scale_log2;
}

// A row of o that was computed: in a tile in shared memory, whose columns of 64 elements are `column_bytes` apart, swizzled by its number there; or
// in global memory.
struct SharedRow {
  unsigned line;
  int in_tile, column_bytes;
  __device__ __forceinline__ unsigned at(int column) const {
    return line + static_cast<unsigned>(column / 64 * column_bytes + ((column / 8 % 8) ^ (in_tile % 8)) * 16 + column % 8 * 2);
  }
  __device__ __forceinline__ unsigned short bits(int column) const { return ptx::ld_shared_2(at(column)); }
  __device__ __forceinline__ void put(int column, unsigned short x) const { ptx::st_shared_2(at(column), x); }
};
struct GlobalRow {
  unsigned short* first;
  __device__ __forceinline__ unsigned short bits(int column) const { return first[column]; }
  __device__ __forceinline__ void put(int column, unsigned short x) const { first[column] = x; }
};

// The same with its term.
template <class Spec, class Place>
__device__ __forceinline__ float whole_score_of(const ForwardCall& p, const Place& place, const GlobalRows<typename Spec::Element>& q, int row,
                                                const GlobalRows<typename Spec::Element>& k, int key, int lane) {
  const float score = score_of<Spec>(p, q, row, k, key, lane);
  if constexpr (kPairOf<Spec>.alibi) {
    const int away = key - aligned_key(p.call, keys_of<Spec>(p.call, place), row);
    return fmaf(-Slope<true>::of(p.call, place).value, fabsf(static_cast<float>(away)), score);
  }
  if constexpr (kPairOf<Spec>.bias != 0) {
    const float term = Terms<kPairOf<Spec>, typename Spec::Element>(p.call, place.batch, place.head, 0).natural(row, key);
    return term <= kLowestBias ? or_lowest(score, term) * kLog2e : fmaf(term, kLog2e, score);
  }
  return score;
}

// Whether dropout leaves the weight of a pair.
template <class Spec, class Place>
__device__ __forceinline__ bool stays(const AttentionParams& call, const Place& place, int row, int key) {
  return Dropout<kPairOf<Spec>>(call, place.entry(), place.head).keeps(row, key);
}

// Whether a pair is of one document.
__device__ __forceinline__ bool same_document(const AttentionParams& call, const Place& place, int row, int key) {
  const PairParams& p = pairs_of(call);
  return p.document_q[place.batch * p.document_q_stride + row] == p.document_k[place.batch * p.document_k_stride + key];
}

__device__ __forceinline__ bool same_document(const AttentionParams& call, const PackedPlace& place, int row, int key) {
  return pairs_of(call).document_q[place.q_begin + row] == pairs_of(call).document_k[place.k_begin + key];
}

// Whether bias and mask let a query see a key.
template <class Spec, class Place>
__device__ __forceinline__ bool sees(const AttentionParams& call, const Place& place, int row, int key) {
  return Terms<kPairOf<Spec>, typename Spec::Element>(call, place.batch, place.head, 0).sees(row, key);
}

// The NaN of row `row` of o, which sees the keys [begin, end): computed again, unless a visible NaN is among its values.
template <class Spec, class Place, class Row>
__device__ __forceinline__ void row_again(const ForwardCall& p, const Place& place, int row, int begin, int end, Row o_row, int lane) {
  using Element = typename Spec::Element;
  const AttentionParams& call = p.call;
  const auto q = queries_at<Element>(call.q, call.q_strides, place);
  const auto k = keys_at<Element>(call.k, call.k_strides, place);
  const auto v = keys_at<Element>(call.v, call.v_strides, place);
#pragma unroll 1
  for (int first = 0; first < p.work.columns_v; first += 32) {
    const int column = first + lane;
    bool wrong = column < p.work.columns_v && is_nan<Element>(o_row.bits(column));
#pragma unroll 1
    for (int key = begin; key < end && !ptx::vote_all(!wrong); ++key) {
      if constexpr (kPairOf<Spec>.documents)
        if (!same_document(call, place, row, key)) continue;
      if constexpr (kPairTerms<Spec>)
        if (!sees<Spec>(call, place, row, key)) continue;
      wrong = wrong && !is_nan<Element>(v.bits(key, column));
    }
    if (ptx::vote_all(!wrong)) continue;
    float greatest = -kInfinity;
#pragma unroll 1
    for (int key = begin; key < end; ++key) {
      if constexpr (kPairOf<Spec>.documents)
        if (!same_document(call, place, row, key)) continue;
      if constexpr (kPairTerms<Spec>)
        if (!sees<Spec>(call, place, row, key)) continue;
      greatest = fmaxf(greatest, whole_score_of<Spec>(p, place, q, row, k, key, lane));
    }
    float o = 0, sum = 0;
#pragma unroll 1
    for (int key = begin; key < end; ++key) {
      if constexpr (kPairOf<Spec>.documents)
        if (!same_document(call, place, row, key)) continue;
      if constexpr (kPairTerms<Spec>)
        if (!sees<Spec>(call, place, row, key)) continue;
      float weight = ptx::ex2(whole_score_of<Spec>(p, place, q, row, k, key, lane) - greatest);
      sum += weight;
      if constexpr (kPairOf<Spec>.dropout) weight = stays<Spec>(call, place, row, key) ? weight * pairs_of(call).dropout_scale : 0.0f;
      if (wrong) o = fmaf(weight, v.value(key, column), o);
    }
    if (wrong) o_row.put(column, static_cast<unsigned short>(ptx::pack2<Element>(o * ptx::rcp(sum), 0.0f)));
  }
}

}  // namespace fattn::v3
